"""Cross-entropies: of tokens, with the whole vocabulary or with it sharded over columns; of classes; of spans.

With x the logits of one position and m the largest, the loss is log(sum exp(x - m)) + m - x[target]. Each column
computes m and the sum of its part; two small all-reduces make them those of the row: the maximum of m, then the sums,
rescaled to it (Megatron-LM's vocab-parallel cross-entropy). Every column gets a bit-identical loss, and the gradient of
its own logits without another collective.

B batch, S sequence, V vocabulary, V_j column j's part of it, C classes, R = B S rows of logits. A loss returns
(sum over counted targets, their number).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.errors import ModelError
from ranvier.layout import part
from ranvier.system.machine import has_triton
from ranvier.tensor.autograd import Function
from ranvier.tensor.mesh import TensorMesh

IGNORED = -100
"""Target of a position that does not count in the loss."""


class TokenLosses(nn.Module):
    """Cross-entropy of each target, -log p, over a vocabulary of known size, so that it can be split: in a split model
    logits are sharded over the vocabulary, and a loss built from these gets them from `SplitTokenLosses`."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab

    def forward(self, logits_BSV: Tensor, targets: object) -> Tensor:
        """See `token_losses`."""
        return token_losses(logits_BSV, targets)


class SplitTokenLosses(nn.Module):
    """The same for logits [B, S, V_j] whose vocabulary is sharded over columns; every column gets the row's losses."""

    def __init__(self, losses: TokenLosses, mesh: TensorMesh) -> None:
        super().__init__()
        self._mesh, self._vocab = mesh, losses.vocab
        self._start = part(losses.vocab, mesh.num_cols, mesh.col)[0]

    def forward(self, logits_BSV: Tensor, targets: object) -> Tensor:
        """logits [B, S, V_j], targets [B, S] int64. IndexError for a target outside the vocabulary, on CPU."""
        targets_BS = _checked_targets(logits_BSV, targets)
        if targets_BS.device.type == "cpu" and targets_BS.numel():  # on CUDA reading them would wait for the device
            least, most = int(targets_BS.where(targets_BS != IGNORED, 0).min()), int(targets_BS.max())
            if least < 0 or most >= self._vocab:
                raise IndexError(f"a target is out of range of the vocabulary of {self._vocab}: {least} to {most}")
        return _SplitTokenLosses.apply(logits_BSV, targets_BS, self._start, self._vocab, self._mesh)


class NextTokenLoss(nn.Module):
    """`next_token_loss` over a vocabulary of known size, so that it can be split."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.losses = TokenLosses(vocab)

    def forward(self, logits_BSV: Tensor, targets: object) -> tuple[Tensor, Tensor]:
        """Sum of the losses of the targets [B, S] that count, and their number."""
        losses_BS, targets_BS = self.losses(logits_BSV, targets), _checked_targets(logits_BSV, targets)
        return losses_BS.sum(), _num_counted(targets_BS)

    @staticmethod
    def is_unshifted(inputs: object, targets: object) -> bool:
        """Whether the targets that count are the inputs at the same positions, like labels of transformers, instead of
        the next positions: the model would learn to repeat each token. Reads the values, so called once a run."""
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if not isinstance(ids, Tensor) or not isinstance(targets, Tensor):
            return False
        if ids.shape != targets.shape or ids.dim() < 2:
            return False
        ids, counts = ids.to(targets.device), targets != IGNORED
        follows = (ids[:, 1:] == targets[:, :-1]) | ~counts[:, :-1]
        return bool(((ids == targets) | ~counts).all()) and not bool(follows.all())


def overwrites_logits(loss: object) -> bool:
    """Whether a loss is built from `TokenLosses`, split or not, whose backward needs no memory besides the logits'."""
    layers = loss.modules() if isinstance(loss, nn.Module) else ()
    return any(isinstance(layer, (TokenLosses, SplitTokenLosses)) for layer in layers)


def vocabulary_of(loss: object) -> int | None:
    """The vocabulary over which a loss can be split; None if it has no `TokenLosses`."""
    layers = loss.modules() if isinstance(loss, nn.Module) else ()
    return next((layer.vocab for layer in layers if isinstance(layer, TokenLosses)), None)


def token_losses(logits_BSV: Tensor, targets: object) -> Tensor:
    """[B, S]: the cross-entropy of each target, 0 where it does not count.

    targets: [B, S] int64, `IGNORED` where none. Losses are fp32 for half-precision logits, else in their dtype.
    The backward overwrites the logits with their gradient, so it can run only once; code that needs the logits after
    the backward must copy them (autograd raises a RuntimeError if it would see changed values). Evaluation, where
    nothing requires a gradient, leaves them unchanged.
    ModelError when the shapes do not fit.
    """
    return _TokenLosses.apply(logits_BSV, _checked_targets(logits_BSV, targets))


def next_token_loss(logits_BSV: Tensor, targets: object) -> tuple[Tensor, Tensor]:
    """Sum of the `token_losses` of the targets that count, and their number."""
    targets_BS = _checked_targets(logits_BSV, targets)
    return token_losses(logits_BSV, targets_BS).sum(), _num_counted(targets_BS)


def _checked_targets(logits_BSV: Tensor, targets: object) -> Tensor:
    if not isinstance(targets, Tensor) or not _are_numbers(targets, logits_BSV.shape[:-1]):
        raise _shape_error(logits_BSV, targets, "Give int64 targets of shape [batch, sequence].")
    return targets.long()


def _are_numbers(targets: Tensor, shape: torch.Size) -> bool:
    """Whether these are indices of tokens or classes, not probabilities, in this shape."""
    return targets.shape == shape and targets.dtype in (torch.int64, torch.int32, torch.uint8)


def _num_counted(targets: Tensor) -> Tensor:
    """The number of targets that are not `IGNORED`, as a 0-dim tensor: reading it would wait for a GPU."""
    return torch.ne(targets, IGNORED).sum()


class ClassLoss(nn.Module):
    """Sum of the cross-entropies of logits [B, C] whose targets [B] int64 are not `IGNORED`, and their number.

    The sum is fp32 for half-precision logits, else in their dtype. On a mesh every column has all logits and computes
    the same loss. ModelError when the shapes do not fit.
    """

    def forward(self, logits_BC: Tensor, targets: object) -> tuple[Tensor, Tensor]:
        """logits [B, C], targets [B] int64."""
        if not isinstance(targets, Tensor) or not _are_numbers(targets, logits_BC.shape[:1]):
            raise _shape_error(logits_BC, targets, "Give int64 targets of shape [batch].")
        targets_B = targets.long()
        return _cross_entropies(logits_BC, targets_B).sum(), _num_counted(targets_B)


class LastTokenLoss(nn.Module):
    """`ClassLoss` of the logits of each sample's last token, from logits [B, S, C].

    targets: {"last": [B], "class": [B]} int64: the token's position, and the class. ModelError as in `last_logits`.
    """

    def forward(self, logits_BSC: Tensor, targets: object) -> tuple[Tensor, Tensor]:
        """logits [B, S, C], targets as above."""
        logits_BC, found = last_logits(logits_BSC, targets)
        losses_B = _cross_entropies(logits_BC, found["class"])
        return losses_B.sum(), _num_counted(found["class"])


def last_logits(logits_BSC: Tensor, targets: object) -> tuple[Tensor, dict[str, Tensor]]:
    """[B, C], or [B, N, C], in fp32 or wider: the logits at the positions targets["last"], [B] or [B, N] int64, or at 0
    where that is `IGNORED`; and the targets. ModelError if the targets lack "last"."""
    if not isinstance(targets, dict) or "last" not in targets:
        raise ModelError("lack the position of each text's last token, `last`", code="targets-of-scores",
                         where="targets of scores", value=type(targets).__name__,
                         remedy="Give {'last': [batch, ...] int64, ...}.")
    last = targets["last"]
    place_BNC = last.clamp(min=0).view(len(last), -1, 1).expand(-1, -1, logits_BSC.shape[-1])
    found_BNC = logits_BSC.gather(1, place_BNC)
    return found_BNC.view(*last.shape, -1).to(torch.promote_types(logits_BSC.dtype, torch.float32)), targets


class SpanLoss(nn.Module):
    """Loss of extractive question answering: logits [B, S, 2] score each token as an answer's first and last one.

    The sum over samples of the mean of both cross-entropies over the S tokens, and the number of samples. A sample with
    an `IGNORED` end does not count.

    targets: {"start": [B], "end": [B]} int64, places in the sequence. Number formats and columns as for `ClassLoss`.
    ModelError when the shapes do not fit.
    """

    def forward(self, logits_BS2: Tensor, targets: object) -> tuple[Tensor, Tensor]:
        """logits [B, S, 2], targets {"start": [B], "end": [B]} int64."""
        if not isinstance(targets, dict) or set(targets) != {"start", "end"} or any(
                not _are_numbers(targets[end], logits_BS2.shape[:1]) for end in targets):
            raise _shape_error(logits_BS2, targets, "Give a dict of int64 targets 'start' and 'end' of shape [batch].")
        numbers = [targets[end].long() for end in ("start", "end")]
        counted_B = (numbers[0] != IGNORED) & (numbers[1] != IGNORED)
        ends_B = [_cross_entropies(logits_BS, numbers_B.where(counted_B, IGNORED))
                  for numbers_B, logits_BS in zip(numbers, logits_BS2.unbind(2), strict=True)]
        return (ends_B[0] + ends_B[1]).sum() / 2, counted_B.sum()


def _cross_entropies(logits_BC: Tensor, targets_B: Tensor) -> Tensor:
    """[B]: one for each sample, 0 where the target is `IGNORED`."""
    wide = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    return functional.cross_entropy(wide, targets_B, ignore_index=IGNORED, reduction="none")


def _shape_error(logits: Tensor, targets: object, remedy: str) -> ModelError:
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()} if isinstance(targets, dict) else (
        f"{tuple(targets.shape)}, {str(targets.dtype).removeprefix('torch.')}" if isinstance(targets, Tensor) else
        type(targets).__name__)
    return ModelError(f"do not fit logits of shape {tuple(logits.shape)}", code="targets-do-not-fit-logits",
                      where="targets", value=shapes, remedy=remedy)


class _TokenLosses(Function):
    """Cross-entropies that save no tensor of the logits' size except the logits, whose memory becomes the gradient.

    On CUDA they use two Triton kernels; elsewhere blocks of rows go through one scratch block, so that no second tensor
    of the logits' size exists.
    """

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        logits_RV, targets_R = logits_BSV.flatten(0, -2), targets_BS.flatten()
        counted_R = targets_R != IGNORED
        ctx.kernel = _kernel(logits_RV)
        if ctx.kernel is not None:
            max_R1, sums_2R1 = ctx.kernel.statistics(logits_RV, targets_R)
            log_sum_R1 = sums_2R1[0].log_().add_(max_R1)
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(logits_BSV, targets_BS, log_sum_R1)
            return _losses(log_sum_R1, sums_2R1[1], targets_BS, logits_RV.shape[1])
        index_R1 = targets_R.where(counted_R, 0).unsqueeze(1)
        scratch = _scratch(logits_RV)
        loss_R1 = scratch.new_empty(index_R1.shape)
        for rows, block in _row_blocks(logits_RV, scratch):
            torch.log_softmax(logits_RV[rows], dim=1, dtype=scratch.dtype, out=block)
            loss_R1[rows] = -block.gather(1, index_R1[rows])
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits_BSV, targets_BS)
        return loss_R1.squeeze(1).where(counted_R, 0).view(targets_BS.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BS: Tensor) -> tuple[Tensor, None]:
        logits_BSV, targets_BS, *log_sum_R1 = ctx.saved_tensors
        logits_RV, targets_R = logits_BSV.flatten(0, -2), targets_BS.flatten()
        counted_R = targets_R != IGNORED
        if ctx.kernel is not None:
            ctx.kernel.overwrite_with_gradient(logits_RV, targets_R, *log_sum_R1,
                                               grad_BS.flatten().to(torch.float32).where(counted_R, 0))
            return logits_RV.view_as(logits_BSV), None
        index_R1 = targets_R.where(counted_R, 0).unsqueeze(1)
        scratch = _scratch(logits_RV)
        scale_R1 = grad_BS.flatten().to(scratch.dtype).where(counted_R, 0).unsqueeze(1)
        for rows, block in _row_blocks(logits_RV, scratch):
            torch.softmax(logits_RV[rows], dim=1, dtype=scratch.dtype, out=block)
            block.scatter_add_(1, index_R1[rows], block.new_full((len(block), 1), -1.0))
            torch.mul(block, scale_R1[rows], out=logits_RV[rows])
        return logits_RV.view_as(logits_BSV), None


class _SplitTokenLosses(Function):
    """`_TokenLosses` of the logits of this column."""

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, start: int, vocab: int, mesh: TensorMesh) -> Tensor:
        logits_RV, targets_R = logits_BSV.flatten(0, -2), targets_BS.flatten()
        ctx.kernel = _kernel(logits_RV)
        own_max_R1, sums_2R1 = (_statistics if ctx.kernel is None else ctx.kernel.statistics)(
            logits_RV, _place_in_column(targets_R, start, logits_RV.shape[1]))
        max_R1 = own_max_R1.clone()
        mesh.over_cols.all_reduce(max_R1, "max").wait()
        sums_2R1[0].mul_((own_max_R1 - max_R1).exp_())
        mesh.over_cols.all_reduce(sums_2R1).wait()
        log_sum_R1 = sums_2R1[0].log_().add_(max_R1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits_BSV, targets_BS, log_sum_R1)
            ctx.start = start
        return _losses(log_sum_R1, sums_2R1[1], targets_BS, vocab)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BS: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_BSV, targets_BS, log_sum_R1 = ctx.saved_tensors
        logits_RV, targets_R = logits_BSV.flatten(0, -2), targets_BS.flatten()
        scale_R1 = grad_BS.flatten().to(log_sum_R1.dtype).where(targets_R != IGNORED, 0).unsqueeze(1)
        (_overwrite_with_gradient if ctx.kernel is None else ctx.kernel.overwrite_with_gradient)(
            logits_RV, _place_in_column(targets_R, ctx.start, logits_RV.shape[1]), log_sum_R1, scale_R1)
        return logits_RV.view_as(logits_BSV), None, None, None, None


def _statistics(logits_RV: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy_kernel.statistics` in torch's operations."""
    scratch, index_R1 = _scratch(logits_RV), index_R.clamp(min=0).unsqueeze(1)
    max_R1 = scratch.new_empty(len(logits_RV), 1)
    sums_2R1 = scratch.new_empty(2, len(logits_RV), 1)
    for rows, block in _row_blocks(logits_RV, scratch):
        block.copy_(logits_RV[rows])
        torch.amax(block, 1, keepdim=True, out=max_R1[rows])
        max_R1[rows].clamp_(min=torch.finfo(block.dtype).min)  # a column may have -inf only
        sums_2R1[1, rows] = block.gather(1, index_R1[rows])
        torch.sum(block.sub_(max_R1[rows]).exp_(), 1, keepdim=True, out=sums_2R1[0, rows])
    sums_2R1[1].masked_fill_((index_R < 0).unsqueeze(1), 0.0)
    return max_R1, sums_2R1


def _overwrite_with_gradient(logits_RV: Tensor, index_R: Tensor, log_sum_R1: Tensor, scale_R1: Tensor) -> None:
    """`cross_entropy_kernel.overwrite_with_gradient` in torch's operations."""
    scratch, index_R1 = _scratch(logits_RV), index_R.clamp(min=0).unsqueeze(1)
    minus_one_R1 = -(index_R1 == index_R.unsqueeze(1)).to(scratch.dtype)
    for rows, block in _row_blocks(logits_RV, scratch):
        torch.sub(logits_RV[rows], log_sum_R1[rows], out=block).exp_()
        block.scatter_add_(1, index_R1[rows], minus_one_R1[rows])
        torch.mul(block, scale_R1[rows], out=logits_RV[rows])


def _place_in_column(targets_R: Tensor, start: int, size: int) -> Tensor:
    """[R] positions of targets among a column's `size` logits from `start` on; -1 for targets elsewhere."""
    return (targets_R - start).where((targets_R >= start) & (targets_R < start + size), -1)


def _losses(log_sum_R1: Tensor, target_R1: Tensor, targets_BS: Tensor, vocab: int) -> Tensor:
    """[B, S] from each row's log of summed exponentials and its target's logit. A target outside the vocabulary, which
    a GPU cannot report without a synchronization, gives NaN."""
    targets_R = targets_BS.flatten()
    inside_R = (targets_R >= 0) & (targets_R < vocab)
    losses_R = (log_sum_R1 - target_R1).squeeze(1).where(inside_R, torch.nan).where(targets_R != IGNORED, 0)
    return losses_R.view(targets_BS.shape)


def _kernel(logits_RV: Tensor) -> ModuleType | None:
    """`cross_entropy_kernel` if it supports these logits: on CUDA, in fp32 or half precision."""
    on_device = logits_RV.is_cuda and type(logits_RV) is Tensor and logits_RV.stride(1) == 1  # has values
    if on_device and logits_RV.numel() and logits_RV.dtype is not torch.float64 and has_triton():
        from ranvier.tensor import cross_entropy_kernel  # needs Triton

        return cross_entropy_kernel
    return None


def _scratch(logits_RV: Tensor) -> Tensor:
    """An uninitialised block of rows; as many as the logits have if nothing is computed."""
    rows, vocab = logits_RV.shape
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    return logits_RV.new_empty((scratch_rows(rows, vocab, logits_RV.device.type), vocab), dtype=wide)


def scratch_rows(rows: int, vocab: int, device_type: str) -> int:
    """Rows of logits in a scratch block: few enough for a CPU's cache, enough for few launches on a GPU."""
    elements = {"cpu": 1 << 18, "meta": rows * vocab}.get(device_type, 1 << 24)
    return min(rows, max(1, elements // vocab))


def _row_blocks(logits_RV: Tensor, scratch: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive blocks of rows, each with the same number of rows of `scratch`."""
    total, size = len(logits_RV), max(1, len(scratch))
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield slice(start, stop), scratch[:stop - start]
