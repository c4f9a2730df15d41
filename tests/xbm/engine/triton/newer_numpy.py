"""Makes Triton's interpreter loop over a kernel's own numbers: numpy no longer makes an int of an array of one."""

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_for_new_numpy(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_for_new_numpy
