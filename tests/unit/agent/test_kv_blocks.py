"""An engine's block set: from its events to index blocks."""

import contextlib

import pytest
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.events import Batch, Cleared, Malformed, Removed, Stored, Tier, decode
from headway_agent.kv.hashing import bound, chained, root_of, token_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

TOKENS = tuple(range(1000, 1000 + 512))


def keys(tokens, adapter="", salt=""):
    """What the index should hold of a prompt, computed the plain way."""
    found, content, root = [], 0, root_of(adapter, salt)
    for start in range(0, len(tokens) // 128 * 128, 128):
        content = chained(token_bytes(tokens[start : start + 128]), content)
        found.append(bound(content, root))
    return found


def stored(tokens, size=16, parent=None, name="b", **fields):
    hashes = tuple(f"{name}{n}".encode() for n in range(len(tokens) // size))
    return Stored(hashes, parent, tuple(tokens), size, **fields)


def gpu(blocks):
    return {own for tier, own in blocks.held() if tier is Tier.GPU}


@pytest.mark.parametrize("size", [1, 16, 32, 64, 128, 256, 512])
def test_engine_blocks_become_index_blocks(size):
    blocks = BlockSet()
    blocks.apply(stored(TOKENS, size))
    assert gpu(blocks) == set(keys(TOKENS))
    assert blocks.take_changes() == ({(Tier.GPU, key): True for key in keys(TOKENS)}, False)


def test_a_part_of_an_index_block_is_none():
    blocks = BlockSet()
    blocks.apply(stored(TOKENS[:112]))
    assert not gpu(blocks)
    blocks.apply(stored(TOKENS[112:128], parent=b"b6", name="c"))
    assert gpu(blocks) == set(keys(TOKENS[:128]))


def test_any_engine_block_that_leaves_takes_its_index_block_along():
    blocks = BlockSet()
    blocks.apply(stored(TOKENS))
    blocks.take_changes()
    blocks.apply(Removed((b"b9",)))
    assert blocks.take_changes() == ({(Tier.GPU, keys(TOKENS)[1]): False}, False)
    assert gpu(blocks) == set(keys(TOKENS)) - {keys(TOKENS)[1]}
    blocks.apply(stored(TOKENS))
    assert gpu(blocks) == set(keys(TOKENS)), "stored again, it is whole again"


def test_two_conversations_share_a_beginning_within_an_index_block():
    one, other = TOKENS[:128], TOKENS[:112] + tuple(range(16))
    blocks = BlockSet()
    blocks.apply(stored(one))
    blocks.apply(stored(other[112:], parent=b"b6", name="c"))
    assert gpu(blocks) == {*keys(one), *keys(other)}
    blocks.apply(Removed((b"b0",)))
    assert not gpu(blocks)
    blocks.apply(Removed((b"c0",)))
    blocks.apply(stored(one[:16]))
    assert gpu(blocks) == set(keys(one))


def test_when_all_is_removed_nothing_is_remembered():
    blocks = BlockSet()
    blocks.apply(stored(TOKENS))
    for block in stored(TOKENS).hashes:  # parents first: they stay known until their children go
        blocks.apply(Removed((block,)))
    assert len(blocks) == 0
    assert not gpu(blocks)


def test_blocks_of_an_unknown_parent_cannot_be_placed():
    blocks = BlockSet(complete=True)
    blocks.apply(stored(TOKENS, parent=b"nobody"))
    assert (gpu(blocks), blocks.complete, blocks.skipped) == (set(), False, 32)


def test_adapters_and_salts_are_kept_apart():
    plain, salted, tuned, both = (BlockSet() for _ in range(4))
    plain.apply(stored(TOKENS))
    salted.apply(stored(TOKENS, extras=(("s3cret",),)))
    tuned.apply(stored(TOKENS, adapter="sql"))
    both.apply(stored(TOKENS, adapter="sql", extras=(("s3cret",),)))
    sets = [gpu(each) for each in (plain, salted, tuned, both)]
    assert sets[1] == set(keys(TOKENS, salt="s3cret"))
    assert sets[2] == set(keys(TOKENS, adapter="sql"))
    assert sets[3] == set(keys(TOKENS, adapter="sql", salt="s3cret"))
    assert len(set.union(*sets)) == sum(map(len, sets))


def test_what_is_no_tokens_never_matches_tokens():
    image = BlockSet()
    image.apply(stored(TOKENS, extras=((), (("digest", 3),))))
    first = BlockSet()
    first.apply(stored(TOKENS, extras=(("digest", "salt"),)))
    assert not gpu(image) & set(keys(TOKENS))
    assert not gpu(first) & {*keys(TOKENS), *keys(TOKENS, salt="salt"), *keys(TOKENS, salt="digest")}


def test_a_tier_is_another_place():
    blocks = BlockSet()
    blocks.apply(stored(TOKENS[:256]))
    blocks.apply(Stored((b"b7",), None, (), 128, tier=Tier.CPU))  # offloaded as one block of 128, named by its last
    blocks.apply(Removed(tuple(f"b{n}".encode() for n in range(16))))
    assert set(blocks.held()) == {(Tier.CPU, keys(TOKENS)[0])}
    blocks.apply(Removed(tuple(f"b{n}".encode() for n in range(8)), Tier.CPU))
    assert len(blocks) == 0


def test_a_cleared_cache_is_complete_knowledge():
    blocks = BlockSet()
    blocks.apply(stored(TOKENS))
    blocks.apply(Cleared())
    assert (list(blocks.held()), blocks.complete, blocks.take_changes()) == ([], True, ({}, True))


def test_memory_is_bounded():
    blocks = BlockSet(max_blocks=16, complete=True)
    blocks.apply(stored(TOKENS))
    assert (len(blocks), blocks.complete) == (16, False)
    assert gpu(blocks) == set(keys(TOKENS[:256]))


def test_blocks_that_make_no_index_block_are_left_alone():
    blocks = BlockSet(complete=True)
    blocks.apply(stored(TOKENS[:480], size=48))
    assert (blocks.unusable_block_size, blocks.complete, len(blocks)) == (48, False, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 23)), max_size=60), st.sampled_from([16, 32])
)
def test_what_is_reported_adds_up_to_what_is_held(steps, size):
    """Conversations that branch anywhere, stored and removed in any order: changes and the set itself agree."""
    blocks, told = BlockSet(), set()
    hashes = set()
    for is_stored, branch, place in steps:
        tokens = TOKENS[: 16 * place] + tuple([branch] * (384 - 16 * place))
        names = tuple(repr(tokens[: (n + 1) * size]).encode() for n in range(len(tokens) // size))
        hashes.update(names)
        if is_stored:
            blocks.apply(Stored(names, None, tokens, size))
        else:
            blocks.apply(Removed(names[place % len(names) :]))
        for key, held in blocks.take_changes()[0].items():
            (told.add if held else told.discard)(key)
        assert told == set(blocks.held())
    blocks.apply(Removed(tuple(hashes)))
    assert (len(blocks), list(blocks.held())) == (0, [])


ARRAY = [
    123.5,
    [
        ["BlockStored", [7, b"\x01"], None, [1, 2, 3, 4], 2, 3, "GPU", "sql", [["sql", "salt"], None]],
        ["BlockRemoved", [7], "CPU"],
        ["AllBlocksCleared"],
        ["SomethingNew", 1],
    ],
    1,
]
MAP = {
    "ts": 123.5,
    "events": [
        {
            "type": "BlockStored",
            "block_hashes": [7, b"\x01"],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": 3,
            "medium": "GPU",
            "lora_name": "sql",
            "extra_keys": [["sql", "salt"], None],
        },
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
        {"type": "SomethingNew"},
    ],
    "data_parallel_rank": 1,
}


@pytest.mark.parametrize("raw", [ARRAY, MAP, [*ARRAY[:2], 1, "more"], MAP | {"more": 1}])
def test_both_encodings_say_the_same(raw):
    event = Stored((7, b"\x01"), None, (1, 2, 3, 4), 2, "sql", Tier.GPU, (("salt",), ()))
    assert decode(msgpack.encode(raw)) == Batch((event, Removed((7,), Tier.CPU), Cleared()), 1)


def test_the_oldest_form_has_few_fields():
    raw = [1.0, [["BlockStored", [5], 4, [1] * 16, 16], ["BlockRemoved", [5]]]]
    assert decode(msgpack.encode(raw)) == Batch((Stored((5,), 4, (1,) * 16, 16), Removed((5,))))


def test_an_adapter_known_by_number_only_is_nobodys():
    raw = [1.0, [["BlockStored", [5], None, [1] * 16, 16, 2]]]
    (event,) = decode(msgpack.encode(raw)).events
    assert event.adapter not in ("", "2")


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"",
        msgpack.encode(3),
        msgpack.encode([1.0, [["BlockStored", [True], None, [1], 1]]]),
        msgpack.encode([1.0, [["BlockStored"]]]),
        msgpack.encode([1.0, [[]]]),
        msgpack.encode([1.0, [7]]),
        msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
    ],
)
def test_what_is_no_batch_is_malformed(payload):
    with pytest.raises(Malformed):
        decode(payload)


@given(st.binary(max_size=60))
def test_no_payload_breaks_the_decoder(payload):
    with contextlib.suppress(Malformed):
        decode(payload)
