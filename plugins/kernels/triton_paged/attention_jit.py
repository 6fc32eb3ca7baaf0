"""The two functions that run on the device: `attend_tiles` and `write_slots`. What they are launched with is decided in `.kernel`.

A tile holds ROWS pairs of a query and a query head, all of one sequence and one KV head: row r is query r // GROUP, head r % GROUP of
the group. So each key that a tile reads serves all heads of its group. The tile then walks over the keys that its queries see, KEYS at a
time, with the online softmax of FlashAttention (Dao et al., 2022) in fp32; scores are in units of log2(e), for exp2.
Where a key lies is computed key by key, so KEYS has nothing to do with the size of a block.
Tiles are numbered as in "The Anatomy of a Triton Attention Kernel" (Ringlein et al., 2025, arXiv 2511.11581).

Must not know: torch, the interpreter (UPCAST says that dot products need fp32 operands), what the rows of a batch stand for.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below any score, yet finite: LOWEST - LOWEST is 0, not NaN


@triton.jit
def row_of_tile(query_start, num_rows, tile, QUERIES: tl.constexpr):
    """The row b that `tile` belongs to: the last one whose first tile, `query_start[b] // QUERIES + b`, isn't behind it.

    Row b gets ceil(n / QUERIES) tiles of its own or one more, which stays empty. Tokens behind the last row are row `num_rows`.
    """
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b with a rounded to b's type, accumulated in fp32; fp32 operands are not rounded to TF32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(b.dtype), b, input_precision="ieee")


# What differs from step to step must not lead to another compilation.
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "place_stride"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "places"],
)
def attend_tiles(
    q,  # [T, H, K_SIZE], any strides but the last
    k_cache,  # [slots, G, K_SIZE]
    v_cache,  # [slots, G, V_SIZE]
    output,  # [T, H, V_SIZE], dense
    sinks,  # [H] or None
    query_start,  # [B + 1]
    seq_lens,  # [B]
    places,  # block table [B, blocks], or region starts [B] where BLOCK_SIZE is 0
    num_rows,  # B
    num_tokens,  # T
    scale,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    place_stride,
    GROUP: tl.constexpr,  # query heads that share a KV head
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # or None
    SOFTCAP: tl.constexpr,  # or None
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: (tiles, KV heads). Each program writes the output of its queries; tokens of rows without positions get zeros."""
    QUERIES: tl.constexpr = ROWS // GROUP
    K_PADDED: tl.constexpr = max(16, triton.next_power_of_2(K_SIZE))
    V_PADDED: tl.constexpr = max(16, triton.next_power_of_2(V_SIZE))
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP

    row = row_of_tile(query_start, num_rows, tile, QUERIES)
    is_row = row < num_rows
    row_start = tl.load(query_start + row)
    row_stop = tl.load(query_start + row + 1, mask=is_row, other=num_tokens)
    length = tl.load(seq_lens + row, mask=is_row, other=0)
    # The tile's tokens are first_token to last_token - 1; a token's position in its sequence is the token plus `shift`.
    first_token = row_start + (tile - (row_start // QUERIES + row)) * QUERIES
    last_token = tl.minimum(first_token + QUERIES, row_stop)
    if first_token >= last_token:
        return
    shift = length - row_stop

    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_query = (rows < QUERIES * GROUP) & (tokens < last_token)
    k_dims = tl.arange(0, K_PADDED)
    v_dims = tl.arange(0, V_PADDED)
    queries = tl.load(
        q + tokens[:, None].to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride + k_dims[None, :],
        mask=is_query[:, None] & (k_dims < K_SIZE)[None, :],
        other=0.0,
    )

    if sinks is not None:  # a score that is there from the start, without a value
        highest = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        highest = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, V_PADDED], tl.float32)

    start = 0
    if WINDOW is not None:
        start = tl.maximum(0, first_token + shift - WINDOW + 1)
    stop = last_token + shift
    for first_key in range(start, stop, KEYS):
        keys = first_key + tl.arange(0, KEYS)  # positions
        is_key = keys < stop
        if BLOCK_SIZE == 0:
            slots = (tl.load(places + row * place_stride) + keys).to(tl.int64)
        else:
            blocks = tl.load(places + row.to(tl.int64) * place_stride + keys // BLOCK_SIZE, mask=is_key, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        k = tl.load(  # [K_PADDED, KEYS]
            k_cache + slots[None, :] * k_slot_stride + kv_head * k_head_stride + k_dims[:, None],
            mask=is_key[None, :] & (k_dims < K_SIZE)[:, None],
            other=0.0,
        )
        v = tl.load(  # [KEYS, V_PADDED]; what is not read must be 0: its weight is 0, and 0 * NaN is NaN
            v_cache + slots[:, None] * v_slot_stride + kv_head * v_head_stride + v_dims[None, :],
            mask=is_key[:, None] & (v_dims < V_SIZE)[None, :],
            other=0.0,
        )

        scores = dot(queries, k, UPCAST) * scale
        if SOFTCAP is not None:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
            scores = SOFTCAP * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / SOFTCAP)) + 1))
        distance = (tokens + shift)[:, None] - keys[None, :]
        is_seen = distance >= 0
        if WINDOW is not None:
            is_seen = is_seen & (distance < WINDOW)
        scores = tl.where(is_seen, scores * LOG2_E, -float("inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + dot(weights, v, UPCAST)
        highest = new_highest

    result = weighted / tl.where(total == 0, 1, total)[:, None]
    tl.store(
        output + (tokens[:, None].to(tl.int64) * num_heads + heads[:, None]) * V_SIZE + v_dims[None, :],
        result.to(output.dtype.element_ty),
        mask=is_query[:, None] & (v_dims < V_SIZE)[None, :],
    )


@triton.jit
def scatter(values, cache, tokens, slots, num_heads, token_stride, head_stride, slot_stride, slot_head_stride, SIZE, PADDED: tl.constexpr):
    """values [T, G, SIZE] at `tokens` -> cache [slots, G, SIZE] at `slots`, all heads of a token at once; PADDED is G * SIZE or more."""
    elements = tl.arange(0, PADDED)
    heads = elements // SIZE
    dims = elements % SIZE
    is_written = (slots >= 0)[:, None] & (heads < num_heads)[None, :]
    sources = values + tokens[:, None].to(tl.int64) * token_stride + (heads * head_stride + dims)[None, :]
    targets = cache + slots[:, None] * slot_stride + (heads * slot_head_stride + dims)[None, :]
    tl.store(targets, tl.load(sources, mask=is_written), mask=is_written)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def write_slots(
    k,  # [T, G, K_SIZE], any strides but the last
    v,  # [T, G, V_SIZE]
    k_cache,  # [slots, G, K_SIZE]
    v_cache,  # [slots, G, V_SIZE]
    slots,  # [T], int64; -1: not written
    num_tokens,  # T
    num_kv_heads,  # G
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_slot_stride,
    k_slot_head_stride,
    v_slot_stride,
    v_slot_head_stride,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: (ceil(T / TOKENS),)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    targets = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    scatter(k, k_cache, tokens, targets, num_kv_heads, k_token_stride, k_head_stride, k_slot_stride, k_slot_head_stride, K_SIZE, K_PADDED)
    scatter(v, v_cache, tokens, targets, num_kv_heads, v_token_stride, v_head_stride, v_slot_stride, v_slot_head_stride, V_SIZE, V_PADDED)
