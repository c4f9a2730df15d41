"""What Triton's interpreter gets wrong with today's numpy, and since its version 3.9 with masks, is put right here."""

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_splat = interpreter.InterpreterBuilder.create_splat


def _patch_for_new_numpy(tensor, scope):
    """Lets a loop run over a kernel's own numbers: numpy no longer makes an int of an array of one."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _splat_as_bool(self, ret_ty, arg):
    """Spreads `i == 0` over a block as bools.

    The interpreter gives the result of a comparison the type of what was compared. Spread by that type, it made an int32 of
    `(offs < n) & (i == 0)`, and from 3.9 on loads and stores refuse such a mask.
    """
    if arg.data.dtype == bool:
        arg = interpreter.TensorHandle(arg.data, tl.int1)
    return _splat(self, ret_ty, arg)


interpreter._patch_lang_tensor = _patch_for_new_numpy
interpreter.InterpreterBuilder.create_splat = _splat_as_bool
