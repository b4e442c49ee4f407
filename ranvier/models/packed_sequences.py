"""Several samples in one sequence: which positions belong together, and which tokens attend to which.

A model that takes packed sequences has `segments` in addition to the tokens in its inputs and in its carried state:
segments_BS int64, 1, 2, ... for the samples of a row in order, and 0 for the padding after them. The functions here are
all that a block needs: positions restart with each segment, and attention stays within it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ranvier.block import State


def positions_of(segments_BS: Tensor) -> Tensor:
    """[B, S] int64: the position of each token in its own sample, from 0."""
    place_S = torch.arange(segments_BS.shape[1], device=segments_BS.device)
    is_first_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    starts_BS = torch.where(is_first_BS, place_S, 0).cummax(1).values
    return place_S - starts_BS


def attention_mask(q_BNSD: Tensor, k_BKSD: Tensor, segments_BS: Tensor | None = None, *, window: int | None = None,
                   needed: bool = False) -> Tensor | None:
    """Mask of the keys to which each query attends in causal attention, bool [queries, keys] or [B, 1, queries, keys].

    Queries are at the last of the keys' positions. None if each query attends to all keys up to its own position, as
    `scaled_dot_product_attention(..., is_causal=True)` does (with one query and cached keys: to all keys).

    Args:
        segments_BS: of packed samples; a query attends to keys of its own sample. Padding attends to padding, so that
            no row of the mask is empty.
        window: number of positions that a query sees, including its own.
        needed: always return a mask.
    """
    num_queries, num_keys = q_BNSD.shape[2], k_BKSD.shape[2]
    is_plain = segments_BS is None and (window is None or window >= num_keys)
    if is_plain and not needed and num_queries in (1, num_keys):
        return None
    place = torch.arange(num_keys, device=k_BKSD.device)
    distance = place[num_keys - num_queries:, None] - place
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if segments_BS is None:
        return mask
    return (mask & (segments_BS[:, :, None] == segments_BS[:, None, :])).unsqueeze(1)


def is_whole_causal(q_BNSD: Tensor, k_BKSD: Tensor, mask: Tensor | None) -> bool:
    """Whether attention without a mask is causal: over equal numbers of keys and queries. A bool in compiled graphs,
    too, where a comparison of sizes is symbolic until it decides a branch."""
    if mask is None and q_BNSD.shape[2] == k_BKSD.shape[2]:  # noqa: SIM103
        return True
    return False


def two_segments(ids_BS: Tensor) -> dict[str, Tensor]:
    """Inputs in which each row has two samples, such as the answers of a pair: `ids` and `segments`."""
    segments_BS = torch.ones_like(ids_BS)
    segments_BS[:, ids_BS.shape[1] // 2:] = 2
    return {"ids": ids_BS, "segments": segments_BS}


def hidden_and_segments(state: State) -> tuple[Tensor, Tensor | None]:
    """x_BSH, and the segments of packed sequences."""
    return (state["hidden"], state["segments"]) if isinstance(state, dict) else (state, None)


def with_hidden(state: State, x_BSH: Tensor) -> State:
    """The state with its hidden states replaced by x_BSH."""
    return {**state, "hidden": x_BSH} if isinstance(state, dict) else x_BSH
