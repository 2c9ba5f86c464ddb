"""Counts, operation by operation, what a symbolic run does: floating-point operations, bytes moved, bytes alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flex_trainer.activations.trace import Work
from flex_trainer.errors import UserError

_INFINITY = (float("inf"), float("-inf"))
_CARRIES_INFINITY = frozenset(
    {"clone", "_to_copy", "copy_", "add", "add_", "sub", "mul", "neg", "where", "masked_fill", "triu", "tril", "cat"}
    | {"stack", "index", "index_select", "gather", "repeat", "constant_pad_nd"}
)
"""Operations of whose infinite inputs the result has some. Others are taken to end them, as softmax does."""
_READS_INFINITY = ("clamp", "nan_to_num", "norm")
"""Operations with these in their names are given infinities as bounds and kinds, and write none."""
_DEVICE = torch.ops.prim.device.default
_GROUPED_MM = torch.ops.aten._grouped_mm.default
_GROUPED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
_GROUPED_BACKWARD = {"grouped_mm_fallback_backward"}


class NotSymbolic(UserError):
    """The forward depends on data, and shapes alone do not tell what it does."""


class OperationCounter(TorchDispatchMode):
    """Adds every operation to the work of the operator that is running.

    Args:
        work: the work of the running operator, forward or backward.
        is_backward: which of the two.
        held_bytes: what autograd holds now.
        has_padding: what a question such as "does the mask keep all?" is answered with.
    """

    def __init__(
        self,
        work: Callable[[], Work],
        is_backward: Callable[[], bool],
        held_bytes: Callable[[], int],
        has_padding: bool,
    ) -> None:
        super().__init__()
        self._work = work
        self._is_backward = is_backward
        self._held_bytes = held_bytes
        self._has_padding = has_padding
        self._known: set[int] = set()
        self._infinite: set[int] = set()
        self.live_bytes = 0
        """Bytes of all storages that the run has made and that are alive."""
        self.gradient_bytes = 0
        """Bytes of parameter gradients among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # asked more often than all else together
            return func(*args, **kwargs)
        leaves = _leaves(args, kwargs)
        if any(_is_real_parameter(leaf) for leaf in leaves):
            raise NotSymbolic("a function that was set on a module reaches parameters outside of the copy of the model")
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._answer(args[0])
        result = _grouped_mm(*args, **kwargs) if func is _GROUPED_MM else func(*args, **kwargs)
        work, is_backward = self._work(), self._is_backward()
        inputs = {_key(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        outputs = [leaf for leaf in _leaves((result,), {}) if isinstance(leaf, torch.Tensor)]
        fresh = [leaf for leaf in outputs if _key(leaf) not in inputs]
        for leaf in fresh:
            self.watch(leaf)
        self._follow_infinity(func, leaves, inputs, outputs)
        # A view touches nothing; an operation in place writes what it reads.
        is_view = not fresh and not func._schema.is_mutable
        if not is_view:
            moved_bytes = sum(map(_bytes, inputs.values())) + sum(map(_bytes, fresh))
            flops = _flops(func, args, kwargs, result)
            if is_backward:
                work.backward_flops += flops
                work.backward_moved_bytes += moved_bytes
            else:
                work.flops += flops
                work.moved_bytes += moved_bytes
        transient_bytes = self.live_bytes - self.gradient_bytes - self._held_bytes()
        if is_backward:
            work.backward_transient_bytes = max(work.backward_transient_bytes, transient_bytes)
        else:
            work.forward_transient_bytes = max(work.forward_transient_bytes, transient_bytes)
        return result

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient was accumulated: it stays after backward."""
        assert parameter.grad is not None
        num_bytes = parameter.grad.untyped_storage().nbytes()
        self.gradient_bytes += num_bytes
        self._work().gradient_bytes += num_bytes

    def _answer(self, scalar: torch.Tensor) -> bool:
        if scalar.dtype != torch.bool:
            raise NotSymbolic(
                f"the model asks for a value (a {scalar.dtype} scalar) that is not known before it runs on data"
            )
        return not self._has_padding

    def watch(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage as alive until it dies."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += num_bytes
        weakref.finalize(storage, _note_death, weakref.ref(self), key, num_bytes)

    def holds_infinity(self, tensor: torch.Tensor) -> bool:
        """Whether infinities were written into the tensor's storage, as into a mask."""
        return _key(tensor) in self._infinite

    def _follow_infinity(self, func: Any, leaves: list[Any], inputs: dict[int, Any], outputs: list[Any]) -> None:
        name = func._overloadpacket.__name__
        is_given = any(type(leaf) is float and leaf in _INFINITY for leaf in leaves)
        is_written = is_given and not any(part in name for part in _READS_INFINITY)
        if is_written or (name in _CARRIES_INFINITY and not self._infinite.isdisjoint(inputs)):
            self._infinite.update(_key(leaf) for leaf in outputs if leaf.is_floating_point())

    def _died(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._infinite.discard(key)
        self.live_bytes -= num_bytes


def _note_death(counter: weakref.ref[OperationCounter], key: int, num_bytes: int) -> None:
    """A storage is gone. It does not keep the counter alive, and with it the twin, for as long as it lives."""
    alive = counter()
    if alive is not None:
        alive._died(key, num_bytes)


def _leaves(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Arguments or results of an operation, which are nested in lists and tuples only."""
    found: list[Any] = []
    for item in (*args, *kwargs.values()):
        if isinstance(item, (list, tuple)):
            found.extend(_leaves(item, {}))
        else:
            found.append(item)
    return found


def _is_real_parameter(leaf: object) -> bool:
    return isinstance(leaf, nn.Parameter) and not isinstance(leaf, FakeTensor)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _grouped_mm(
    rows: torch.Tensor,
    other: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result's shape; torch's own rule for it knows bfloat16 only.

    (S, D) x (E, D, I) -> (S, I); (D, S) x (S, I) -> (E, D, I), gradients of weights;
    (E, S, D) x (E, D, I) -> (E, S, I).
    """
    shape: tuple[int, ...]
    if rows.dim() == 2 and other.dim() == 2:
        assert offsets is not None
        shape = (offsets.shape[0], rows.shape[0], other.shape[1])
    elif rows.dim() == 2 or other.dim() == 2:
        shape = (rows.shape[-2], other.shape[-1])
    else:
        shape = (rows.shape[0], rows.shape[1], other.shape[-1])
    return rows.new_empty(shape, dtype=out_dtype or rows.dtype)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    name = func._overloadpacket.__name__
    if name in _GROUPED:
        rows, weight = args[0], args[1]
        return _grouped_flops(rows, weight)
    if name in _GROUPED_BACKWARD:
        rows, weight = args[0], args[1]
        return 2 * _grouped_flops(rows, weight)
    return 0.0


def _grouped_flops(rows: torch.Tensor, weight: torch.Tensor) -> float:
    """Every row meets one expert's matrix; the gradient of a weight is a product of two matrices of rows."""
    if rows.dim() == 2 and weight.dim() == 3:
        return 2.0 * rows.shape[0] * weight.shape[-2] * weight.shape[-1]
    return 2.0 * rows.shape[-1] * rows.shape[-2] * weight.shape[-1]
