"""Large batches in the memory of small ones: embed in chunks, differentiate the loss, then embed and back-propagate each chunk.

The idea is that of GradCache (arXiv 2101.06983). Three passes make one step:

    1  embed each chunk without a graph: (N, D) embeddings
    2  compute the loss on all of them and back-propagate it to them: (N, D) gradients
    3  embed each chunk again, with a graph and the same random numbers, and back-propagate its rows of that gradient
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from xbm.checks import plain_integer
from xbm.errors import InputError

__all__ = ["cached_backward"]

Model = Callable[[Any], Tensor]


@torch.enable_grad()
def cached_backward(
    model: Model | tuple[Model, ...] | list[Model],
    inputs: Any,
    loss_fn: Callable[..., Tensor],
    *,
    chunk: int = 32,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Computes a loss of N embeddings and back-propagates it through the model in chunks: `loss_fn(model(inputs)).backward()`.

    The gradients are those of that call, up to rounding, and are added to `.grad`. Activations exist for one chunk at a time,
    so N is limited by the loss and no longer by the model. The price is a second forward pass.

    `model(part)` is called with some rows of the inputs in the same structure (a mapping becomes a dict) and must return one
    tensor (n, D). If your model takes or returns anything else, wrap it: `lambda batch: model(**batch).pooler_output`, or
    `lambda batch: model(batch)["sentence_embedding"]`.

    - **Randomness.** The second forward pass repeats the random numbers of the first, so dropout masks are the same. It covers
      torch's default generators: of the CPU, of the devices of inputs and model, and of the current CUDA device. Afterwards
      they are where one forward pass, chunk by chunk, and the loss have left them.
    - **Autocast.** Both forward passes and the loss run under the caller's autocast, the backward passes outside of it.
    - **Layers with state.** Batch normalization of a chunk is not that of the batch, and spectral normalization changes its
      weights in every forward pass; both are refused in train mode. Other layers that change their own state in a forward pass
      do so twice; if their output depends on it, the gradients differ. Statistics of the batch that a model computes by itself
      cannot be detected: they would be those of each chunk.
    - **DistributedDataParallel.** Gradients are reduced once, in the last backward pass through the model, whatever number of
      chunks each rank has. Parameters of the model that only the loss uses, such as a temperature, are reduced with the others.

    Args:
        model: any callable, or a tuple or list of them, one for each of several inputs. A model may appear more than once.
        inputs: a tensor, or a mapping, tuple or list of tensors, split along dimension 0. Other entries are passed on
            unchanged. With several models: a tuple or list with the inputs of each, which may differ in length.
        loss_fn: called once, with the embeddings (N, D) of each input, which require a gradient; returns a scalar tensor. It
            may enqueue into a memory. Its own parameters, and the rows of a memory with update="backprop", get a gradient too.
        chunk: the number of inputs to embed at a time.
        scaler: scales the loss before it is back-propagated.

    Returns:
        The loss, detached and not scaled.

    Raises:
        InputError: if an argument is invalid, if the model normalizes by batch statistics or spectrally, or if the model or the
            loss returns anything but the tensors above.

    Example:
        >>> from xbm import ContrastiveLoss, CrossBatchMemory
        >>> model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1))
        >>> memory, loss_fn = CrossBatchMemory(size=1000, dim=4), ContrastiveLoss()
        >>> inputs, labels, ids = torch.randn(500, 6), torch.arange(500) // 4, torch.arange(500)
        >>> def loss_of(v):
        ...     v = nn.functional.normalize(v)
        ...     memory.enqueue(v.detach(), labels, ids)
        ...     return loss_fn(v, labels, memory, ids=ids)
        >>> loss = cached_backward(model, inputs, loss_of, chunk=32)
        >>> loss.requires_grad, model[0].weight.grad.shape, len(memory)
        (False, torch.Size([4, 6]), 500)

        Two models, or one model for two inputs:

        >>> queries, documents = torch.randn(10, 6), torch.randn(30, 6)
        >>> loss = cached_backward((model, model), (queries, documents), lambda q, d: (q @ d.T).logsumexp(1).mean(), chunk=8)
    """
    height = plain_integer(chunk)
    if height is None or height < 1:
        raise InputError(f"chunk must be an integer of at least 1, got {chunk!r}")
    if not callable(loss_fn):
        raise InputError(f"loss_fn must be callable, got {type(loss_fn).__name__}: pass a function of the embeddings")
    parts = _parts(model, inputs, height)
    random = _Random({device for part in parts for device in part.devices()})
    embeddings, starts = [], []
    with torch.no_grad():
        for part in parts:
            starts.append(random.state())
            embeddings.append(part.embed())
    torch.clear_autocast_cache()  # in older versions of torch it holds weights that were cast without a graph

    with _unsynchronized({replica for part in parts for replica in part.replicas}):
        loss = loss_fn(*(v.requires_grad_() for v in embeddings))
        _check_loss(loss)
        others = _leaves(loss) - set(embeddings)  # parameters of the loss, and rows of a memory
        _backward([loss if scaler is None else scaler.scale(loss)], [None])
    loss, gradients = loss.detach(), [v.grad for v in embeddings]
    del embeddings

    trained, after = bool(others), random.state()
    try:
        for number, part in enumerate(parts):
            random.restore(starts[number])
            later = {replica for other in parts[number + 1 :] for replica in other.replicas}
            ending = [replica for replica in part.replicas if replica not in later]
            trained |= part.back_propagate(gradients[number], ending, others, random)
            gradients[number] = None
    finally:
        random.restore(after)
    if not trained:
        raise InputError(
            "no output of the model requires a gradient: call the model itself, not a method that disables gradients, and let "
            "some of its parameters require one"
        )
    return loss


class _Part:
    """A model and its inputs, of which it embeds `chunk` at a time."""

    def __init__(self, model: Model, inputs: Any, chunk: int) -> None:
        if not callable(model):
            raise InputError(f"model must be callable, or a tuple or list of callables, got {type(model).__name__}")
        self.model, self.inputs, self.chunk = model, inputs, chunk
        self.length = _length(inputs)
        self.modules = list(_modules(model))
        layers = {layer: name for module in self.modules for name, layer in module.named_modules()}
        self.replicas = [layer for layer in layers if isinstance(layer, DistributedDataParallel)]
        if any(replica.static_graph for replica in self.replicas):
            raise InputError("DistributedDataParallel with static_graph=True cannot postpone a reduction: leave it out")
        for layer, name in layers.items():
            if isinstance(layer, _BatchNorm) and (layer.training or (layer.running_mean is None and layer.running_var is None)):
                raise InputError(
                    f"the batch-norm layer {name or type(layer).__name__!r} would normalize each chunk, not the batch: call "
                    "eval() on the model's batch-norm layers, which then use running statistics, or use group or layer norm"
                )
            if layer.training and _is_spectral(layer):
                owner = name.partition("parametrizations")[0].rstrip(".")
                raise InputError(
                    f"the spectral norm of {owner or 'the model'} changes the weights in each of the two forward passes: call "
                    "eval() on the layers that have it"
                )

    def devices(self) -> Iterator[torch.device]:
        """Where random numbers may be drawn."""
        yield from (tensor.device for tensor in _tensors(self.inputs))
        for module in self.modules:
            yield from (tensor.device for tensor in (*module.parameters(), *module.buffers()))

    def __call__(self, start: int) -> Tensor:
        """(n, D): embeds the chunk that begins at `start`."""
        rows = min(self.chunk, self.length - start)
        entry = _rows(self.inputs, start, start + rows)
        try:
            v = self.model(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if _are_arguments(entry, self.model):
                raise InputError(f"the model takes {', '.join(entry)}: call it by lambda batch: model(**batch)") from error
            raise
        if not isinstance(v, Tensor) or v.dim() != 2 or len(v) != rows or not v.is_floating_point():
            returned = f"{v.dtype} of shape {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
            raise InputError(
                f"the model must return one float tensor ({rows}, D) for {rows} inputs, got {returned}: wrap it in a function "
                "that returns the embeddings alone"
            )
        return v

    def embed(self) -> Tensor:
        """(N, D): embeds all inputs."""
        first = self(0)
        embeddings = first.new_empty(self.length, first.shape[1])
        embeddings[: len(first)] = first
        del first
        for start in range(self.chunk, self.length, self.chunk):
            v = self(start)
            if v.shape[1:] != embeddings.shape[1:] or v.dtype != embeddings.dtype:
                raise InputError(
                    f"the model returned {v.dtype} of dimension {v.shape[1]} after {embeddings.dtype} of dimension "
                    f"{embeddings.shape[1]}: return the same for every chunk"
                )
            embeddings[start : start + len(v)] = v
            del v
        return embeddings

    def back_propagate(
        self, gradient: Tensor | None, ending: list[DistributedDataParallel], others: set[Tensor], random: "_Random"
    ) -> bool:
        """Embeds every chunk with a graph and back-propagates its rows of the gradient; returns whether there was a graph.

        `ending`: the replicas that reduce in the last backward pass; `others`: what the loss has back-propagated to by itself.
        """
        starts = range(0, self.length, self.chunk)
        if gradient is None:  # other ranks may have one, and wait for this one where they reduce
            starts = starts[-1:] if ending else starts[:0]
        had_graph = False
        for start in starts:
            reducing = ending if start == starts[-1] else []
            # A replica that reduces waits for all of its parameters. Those that the loss used by itself take part with a zero
            # gradient, unless it looks for unused parameters: then it knows that its output does not depend on them.
            waiting = [replica for replica in reducing if not replica.find_unused_parameters]
            roots: list[Tensor] = [p for replica in waiting for p in replica.parameters() if p in others]
            rows: list[Tensor | None] = [torch.zeros_like(p) for p in roots]
            with _unsynchronized(set(self.replicas) - set(reducing)):
                v = self(start)
                if v.requires_grad:
                    roots.append(v)
                    rows.append(torch.zeros_like(v) if gradient is None else gradient[start : start + self.chunk])
                    had_graph = True
                state = random.state()
                if roots:
                    _backward(roots, rows)
                random.restore(state)  # some backward passes draw numbers
            del v, roots, rows
        return had_graph


def _is_spectral(layer: nn.Module) -> bool:
    """Whether a layer's forward pass makes a step of the power iteration, in either of torch's two forms of spectral norm."""
    hooks = layer._forward_pre_hooks.values()
    return any(isinstance(hook, SpectralNorm) for hook in hooks) or (isinstance(layer, _SpectralNorm) and hasattr(layer, "_u"))


def _parts(model: Model | tuple[Model, ...] | list[Model], inputs: Any, chunk: int) -> list[_Part]:
    if not isinstance(model, tuple | list):
        return [_Part(model, inputs, chunk)]
    if not isinstance(inputs, tuple | list) or len(inputs) != len(model) or not model:
        passed = f"{len(inputs)}" if isinstance(inputs, tuple | list) else type(inputs).__name__
        raise InputError(f"{len(model)} models need as many inputs, in a tuple or list, got {passed}: pass one for each model")
    return [_Part(*pair, chunk) for pair in zip(model, inputs)]


def _tensors(inputs: Any) -> Iterator[Tensor]:
    """The tensors with rows, at any depth."""
    if isinstance(inputs, Tensor) and inputs.dim() > 0:
        yield inputs
    elif isinstance(inputs, Mapping | tuple | list):
        for entry in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _tensors(entry)


def _rows(inputs: Any, start: int, stop: int) -> Any:
    """The same structure with rows start to stop of every tensor."""
    if isinstance(inputs, Tensor):
        return inputs[start:stop] if inputs.dim() > 0 else inputs
    if isinstance(inputs, Mapping):
        return {name: _rows(entry, start, stop) for name, entry in inputs.items()}
    if isinstance(inputs, tuple | list):
        entries = [_rows(entry, start, stop) for entry in inputs]
        return type(inputs)(*entries) if hasattr(inputs, "_fields") else type(inputs)(entries)  # a named tuple, or a plain one
    return inputs


def _are_arguments(entry: Any, model: Any) -> bool:
    """Whether a model takes the entries of a dict as arguments of these names."""
    with suppress(TypeError, ValueError):  # no signature
        return isinstance(entry, dict) and {*entry} <= {*inspect.signature(getattr(model, "forward", model)).parameters}
    return False


def _length(inputs: Any) -> int:
    """N, the number of rows of every tensor."""
    lengths = sorted({len(tensor) for tensor in _tensors(inputs)})
    if not lengths:
        raise InputError(
            f"inputs must be a tensor, or a mapping, tuple or list of tensors, got {type(inputs).__name__} without any: "
            "convert them first, texts for example with a tokenizer"
        )
    if len(lengths) > 1:
        raise InputError(f"inputs must have the same length along dimension 0, got {lengths}: pass one row per embedding")
    if lengths[0] == 0:
        raise InputError("inputs must have at least 1 row, got 0")
    if any(tensor.requires_grad and not tensor.is_leaf for tensor in _tensors(inputs)):
        raise InputError(
            "inputs must not have a graph of their own, which every chunk would go through: detach them, or make what computes "
            "them a part of the model"
        )
    return lengths[0]


def _modules(model: object, names: Iterable[str] = (), depth: int = 4) -> Iterator[nn.Module]:
    """The modules that a callable is, belongs to or uses: a module, its method, a partial, a function with its variables.

    Of the attributes of other objects, those with the given names count: the ones that the calling code reads.
    """
    if isinstance(model, nn.Module):
        yield model
    elif depth:
        found: Iterable[object] = ()
        if isinstance(model, functools.partial):
            found = (model.func, *model.args, *model.keywords.values())
        elif inspect.ismethod(model):
            found, names = (model.__self__, model.__func__), model.__code__.co_names if hasattr(model, "__code__") else ()
        elif inspect.isfunction(model):
            names = model.__code__.co_names
            with suppress(ValueError):  # a variable without a value yet
                variables = inspect.getclosurevars(model)
                found = (*variables.nonlocals.values(), *variables.globals.values(), *(model.__defaults__ or ()))
        elif isinstance(model, Mapping | tuple | list):
            found = islice(model.values() if isinstance(model, Mapping) else model, 100)  # models, not a data set
        elif not inspect.isroutine(model) and not inspect.isclass(model):
            own = getattr(model, "__dict__", {})
            methods = (inspect.getattr_static(type(model), name, None) for name in names)
            found = (
                *(own.values() if callable(model) else [own[name] for name in names if name in own]),
                *(method.__get__(model) for method in methods if inspect.isfunction(method)),
            )
        for each in found:
            yield from _modules(each, names, depth - 1)


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        returned = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"loss_fn must return a scalar tensor, got {returned}: return the loss alone, as one number")
    if not loss.requires_grad:
        raise InputError("the loss requires no gradient: compute it from the embeddings that loss_fn is called with")


def _backward(roots: list[Tensor], gradients: list[Tensor | None]) -> None:
    """torch's backward, outside autocast, where the operations of a backward pass have the types of the forward pass."""
    with ExitStack() as stack:
        for kind in {"cpu", *(root.device.type for root in roots)}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        torch.autograd.backward(roots, gradients)


def _leaves(loss: Tensor) -> set[Tensor]:
    """All leaves that the loss back-propagates to."""
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if type(node).__name__ == "AccumulateGrad"}


def _unsynchronized(replicas: Iterable[DistributedDataParallel]) -> ExitStack:
    """Leaves the gradients of backward passes on each rank, to be reduced by a later one."""
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.no_sync())
        return stack.pop_all()


class _Random:
    """The default generators of the CPU, of the given devices, and of the current CUDA device if CUDA is in use."""

    def __init__(self, devices: set[torch.device]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices = {*devices, torch.device("cuda", torch.cuda.current_device())}
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]

    def state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in self.devices)]

    def restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self.devices, states[1:]):
            torch.get_device_module(device).set_rng_state(state, device)
