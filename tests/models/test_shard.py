"""Slices of a model: together they are all of it, groups stay whole, and what cannot be cut says why."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pageturner.formats.ggml import dequantise
from pageturner.kernels.adapters import FIELDS
from pageturner.kernels.base import AttentionShape, Tensor
from pageturner.models.load import open_model
from pageturner.models.names import gguf_layout, named
from pageturner.models.shard import ONCE, RULES, Divisible, Shard, _balanced, shard_of
from pageturner.models.spec import ModelSpec
from pageturner.models.stages import Stage, balanced, stage_of
from pageturner.models.weights import read_part
from support.adapters import random_weights
from support.refusals import engine_fault

GOLDENS = Path(__file__).parent.parent / "goldens"
NAMES = ("tiny_llama", "tiny_llama_quant", "tiny_qwen3", "tiny_llama_untied")


def where(name: str) -> Path:
    """A GGUF file, or a folder."""
    return GOLDENS / name if "/" in name else GOLDENS / f"{name}.gguf"


def shards(name: str, size: int, quantization: str = "none") -> list[Shard]:
    file, spec, layout = open_model(where(name))
    kinds = {name: info.kind for name, info in file.tensors.items()}
    model = Divisible(spec, layout, kinds, quantization)
    return [shard_of(model, rank, size) for rank in range(size)]


def values(tensor: Tensor) -> np.ndarray:
    return dequantise(tensor.kind, tensor.shape, tensor.data)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_slices_are_the_whole_side_by_side(name: str, size: int) -> None:
    file, spec, layout = open_model(GOLDENS / f"{name}.gguf")
    each = shards(name, size)
    for field, part in (*layout.layers[0].items(), *layout.top.items()):
        whole = read_part(file, part)
        slices = [values(shard.of(field, whole)) for shard in each]
        if field not in RULES:
            assert all(np.array_equal(one, values(whole)) for one in slices), field
        elif not (spec.kv_heads < size and field in ("k", "v")):
            assert np.array_equal(np.concatenate(slices, axis=RULES[field].axis), values(whole)), (
                field
            )


def test_a_bias_behind_a_sum_is_added_once() -> None:
    bias = Tensor("b", "F32", (4,), np.arange(4, dtype=np.float32).view(np.uint8))
    first, second = shards("tiny_llama", 2)
    for field in ONCE:
        assert values(first.of(field, bias)).tolist() == [0, 1, 2, 3]
        assert values(second.of(field, bias)).tolist() == [0, 0, 0, 0]


def spec_of(heads: int, kv_heads: int, ffn: int = 128) -> ModelSpec:
    return replace(
        open_model(GOLDENS / "tiny_llama.gguf")[1], heads=heads, kv_heads=kv_heads, ffn=ffn
    )


def ranges(heads: int, kv_heads: int, size: int) -> tuple[object, object]:
    spec = spec_of(heads, kv_heads)
    layout = gguf_layout(spec, lambda name: False)
    kinds = {part.name: "F32" for part in layout.all()}
    found = shard_of(Divisible(spec, layout, kinds), 0, size).ranges
    return found["heads"], found["kv_heads"]


def test_query_heads_are_where_their_kv_head_is() -> None:
    assert ranges(9, 3, 2) == (((0, 3), (3, 9)), ((0, 1), (1, 3)))
    assert ranges(8, 4, 4) == (((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (1, 2), (2, 3), (3, 4)))
    # fewer KV heads than ranks: several have the same
    assert ranges(9, 3, 4) == (((0, 1), (1, 3), (3, 6), (6, 9)), ((0, 1), (0, 1), (1, 2), (2, 3)))
    assert ranges(4, 1, 4) == (((0, 1), (1, 2), (2, 3), (3, 4)), ((0, 1),) * 4)


def test_kv_of_all_ranks_is_counted_where_several_have_the_same() -> None:
    assert [shard.kv_heads for shard in shards("tiny_llama_untied", 2)] == [2, 2]  # of one KV head
    assert [shard.kv_heads for shard in shards("tiny_llama", 2)] == [2, 2]


def test_slopes_and_sinks_go_with_their_heads() -> None:
    whole = AttentionShape(4, 2, 16, 0.25, slopes=(1.0, 2.0, 3.0, 4.0), sinks=(5.0, 6.0, 7.0, 8.0))
    mine = shards("tiny_llama", 2)[1].attention(whole)
    assert (mine.heads, mine.kv_heads, mine.slopes, mine.sinks) == (2, 1, (3.0, 4.0), (7.0, 8.0))


def test_shares_of_ranks_are_known() -> None:
    first, second = shards("tiny_llama", 2)
    assert (first.times("q"), second.times("down"), first.times("attn_norm")) == (2, 2, 1)
    assert second.starts == (0, 160, 320)
    assert second.first_token == 160


def test_a_cut_through_a_group_is_refused_with_the_tensor_and_what_works() -> None:
    with engine_fault(code="tensor_parallel") as caught:
        shards("tiny_llama_quant", 4)
    assert "'blk.0.attn_output.weight', of 64 columns in groups of 32" in caught.value.message
    assert caught.value.message.endswith("--tensor-parallel-size may be 1, 2")


def test_so_it_is_where_the_load_makes_the_groups() -> None:
    assert len(shards("tiny_llama", 4)) == 4
    with engine_fault(r"attn_output.weight.*may be 1, 2"):
        shards("tiny_llama", 4, "int8")


def test_an_mlp_that_is_too_narrow_is_refused() -> None:
    spec = spec_of(64, 64, ffn=96)
    layout = gguf_layout(spec, lambda name: False)
    kinds = {part.name: "Q8_0" for part in layout.all()}
    with engine_fault(r"'blk.0.ffn_down.weight', of 96 columns in groups of 32"):
        shard_of(Divisible(spec, layout, kinds), 0, 4)


def test_more_ranks_than_heads_are_refused() -> None:
    with engine_fault(r"4 query heads cannot be divided among 8 ranks.*may be 1, 2, 3, 4"):
        shards("tiny_llama", 8)


def test_a_latent_kv_is_refused_by_name() -> None:
    with engine_fault(r"latent KV.*--tensor-parallel-size 1"):
        shards("families/deepseek_v2", 2)


@pytest.mark.parametrize("name", ["experts_mixtral", "families/gpt_oss", "families/llama4_text"])
def test_slices_of_experts_are_the_whole_side_by_side(name: str) -> None:
    file, spec, layout = open_model(where(name))
    each = shards(name, 2)
    for layer, one in enumerate(layout.layers):
        listed = [(field, part) for field, parts in layout.several[layer].items() for part in parts]
        for field, part in listed + [
            (named(spec, layer, field), part) for field, part in one.items()
        ]:
            whole = read_part(file, part)
            slices = [values(shard.of(field, whole)) for shard in each]
            if field in ONCE:
                assert np.array_equal(slices[0], values(whole)), field
                assert not slices[1].any(), field
            elif field not in RULES:
                assert all(np.array_equal(one, values(whole)) for one in slices), field
            else:
                assert np.array_equal(
                    np.concatenate(slices, axis=RULES[field].axis), values(whole)
                ), field


def test_an_expert_that_is_too_narrow_is_refused_with_its_tensor() -> None:
    for name, quantization in (("experts_qwen3moe_quant", "none"), ("experts_qwen3moe", "int8")):
        with engine_fault(r"'blk.0.ffn_down_exps.weight', of 32 columns.*may be 1$"):
            shards(name, 2, quantization)


def test_an_adapter_is_cut_beside_what_is_cut() -> None:
    spec = open_model(where("families/llama3"))[1]
    whole = random_weights(spec, (*FIELDS, "embed", "head"), 3)
    first, second = (shard.adapter(whole) for shard in shards("families/llama3", 2))
    for field, pair in whole.layers[1].items():
        mine, other = first.layers[1][field], second.layers[1][field]
        if field in ("o", "down"):
            assert np.array_equal(np.hstack([mine.a, other.a]), pair.a), field
            assert mine.b is other.b is pair.b
        else:
            assert np.array_equal(np.vstack([mine.b, other.b]), pair.b), field
            assert mine.a is other.a is pair.a
        assert mine.scale == pair.scale
    assert first.embed is whole.embed
    heads = [one.head.b for one in (first, second, whole) if one.head]
    assert np.array_equal(np.vstack(heads[:2]), heads[2])


# -- stages --------------------------------------------------------------------------------------------------
def stages(name: str, size: int) -> list[Stage]:
    file, spec, layout = open_model(where(name))
    nbytes = {name: info.nbytes for name, info in file.tensors.items()}
    return [stage_of(spec, layout, nbytes, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_largest_stage_is_as_small_as_it_can_be(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(30):
        each = random.integers(1, 50, 7).tolist()
        first, last = random.integers(0, 120, 2).tolist()

        def largest(
            borders: tuple[int, ...], each: list[int] = each, ends: tuple[int, int] = (first, last)
        ) -> int:
            sums = [sum(each[begin:end]) for begin, end in itertools.pairwise(borders)]
            sums[0], sums[-1] = sums[0] + ends[0], sums[-1] + ends[1]
            return max(sums)

        found = balanced(each, first, last, size)
        assert (found[0], found[-1], len(found)) == (0, 7, size + 1)
        assert all(begin < end for begin, end in itertools.pairwise(found))
        inner = itertools.combinations(range(1, 7), size - 1)
        assert largest(found) == min(largest((0, *borders, 7)) for borders in inner)


def test_layers_are_divided_by_bytes_with_embedding_and_head() -> None:
    assert balanced([10] * 8, 0, 0, 4) == (0, 2, 4, 6, 8)
    assert balanced([10] * 8, 20, 0, 2) == (0, 3, 8)
    assert balanced([10] * 8, 20, 20, 3) == (0, 2, 6, 8)
    assert balanced([30, 10, 10, 10], 0, 0, 2) == (0, 1, 4)
    assert balanced([10] * 3, 1000, 0, 3) == (0, 1, 2, 3)  # a layer at least


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_untied", "families/mixtral"])
def test_every_layer_is_at_one_stage_and_the_ends_by_the_table(name: str) -> None:
    file, spec, layout = open_model(where(name))
    each = sorted(stages(name, 2), key=lambda stage: stage.number)
    owners = [[stage.number for stage in each if stage.has_layer(i)] for i in range(spec.layers)]
    assert sorted(itertools.chain(*owners)) == [0, 1]
    tied = "head" not in layout.top
    for field, part in layout.top.items():
        whole = read_part(file, part)
        found = [stage.of(field, whole) for stage in each]
        rule = RULES.get(field)
        for stage, mine in zip(each, found, strict=True):
            has = rule is None or stage.number == (0 if field == "embed" else 1) or tied
            assert np.array_equal(values(mine), values(whole)[: None if has else 1]), (
                field,
                stage.number,
            )
    for field in (*layout.top, "q"):
        if field == "q" or field in RULES:
            assert sum(stage.times(field) for stage in each) == (2 if field == "q" else 1), field


def test_rank_0_is_the_last_stage() -> None:
    assert [stage.number for stage in stages("tiny_llama", 2)] == [1, 0]
    assert [stage.has_layer(0) for stage in stages("tiny_llama", 2)] == [False, True]


def test_a_stage_has_what_an_adapter_adds_to_its_layers() -> None:
    spec = open_model(where("families/mistral"))[1]
    whole = random_weights(spec, (*FIELDS, "embed", "head"), 3)
    last, first = (stage.adapter(whole) for stage in stages("families/mistral", 2))
    assert first.layers + last.layers == whole.layers
    assert (first.embed, last.embed) == (whole.embed, None)
    assert (first.head, last.head) == (None, whole.head)


def test_more_stages_than_layers_are_refused_with_what_works() -> None:
    with engine_fault(r"2 layers cannot be divided.*--pipeline-parallel-size may be 1 to 2$"):
        stages("tiny_llama", 3)


@pytest.mark.parametrize("seed", range(50))
def test_neurons_make_up_for_heads(seed: int) -> None:
    """Whole units, one at least; whoever has more heads has fewer, as close to even as a unit allows."""
    dice = random.Random(seed)
    size, unit = dice.randint(1, 6), dice.choice((1, 32, 256))
    units = dice.randint(size, 80)
    count, work = units * unit + dice.randrange(unit), 1000 * units
    besides = [dice.randrange(work // size // 2 + 1) for _ in range(size)]
    found = _balanced(count, unit, besides, work)
    assert (found[0][0], found[-1][1]) == (0, count)
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(found))
    assert all(end - first >= unit and first % unit == 0 for first, end in found)
    loads = [
        one + 1000 * ((end - first) // unit)
        for one, (first, end) in zip(besides, found, strict=True)
    ]
    assert max(loads) <= max((sum(besides) + work) / size + 1000, max(besides) + 1000)
    alike = _balanced(count, unit, [7] * size, work)
    assert [first for first, _ in alike] == [unit * (units * rank // size) for rank in range(size)]
