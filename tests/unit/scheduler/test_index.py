"""Chains and fingerprints: who holds which prefix."""

import numpy as np
import pytest
from headway_scheduler.domain.request import BlocksPrompt, Request, TextPrompt, TokensPrompt
from headway_scheduler.index.chain import ChainIndex
from headway_scheduler.index.fingerprint import FingerprintIndex, fingerprint
from headway_scheduler.index.hashing import BYTES, TOKENS, chain_of, identity_of, root_of
from headway_scheduler.index.values import Chain
from hypothesis import given
from hypothesis import strategies as st

SLOTS = np.arange(8, dtype=np.int32)


def chain(*hashes, tokens=128.0):
    return Chain(1, list(hashes), tokens)


def held(index, of):
    return {slot: int(n) for slot, n in enumerate(index.match(of).tokens(SLOTS, 16)) if n}


def request(prompt, domain="tenant/a", model="m", adapter="", **changes):
    return Request("r", "a", domain, model, prompt, adapter=adapter, **changes)


def token_chain(ids, **changes):
    return chain_of(request(TokensPrompt(np.array(ids, "<u4").tobytes()), **changes), 4.0, 4096)


class TestChain:
    def test_longest_match_of_every_endpoint(self):
        index = ChainIndex()
        index.touch(0, chain(1, 2, 3))
        index.touch(1, chain(1, 2))
        index.touch(2, chain(1))
        index.touch(3, chain(9))
        assert held(index, chain(1, 2, 3, 4)) == {0: 384, 1: 256, 2: 128}

    def test_a_prompt_that_branches_shares_its_first_block(self):
        index = ChainIndex()
        one, other = token_chain([1] * 128 + [2] * 128), token_chain([1] * 128 + [3] * 128)
        index.touch(0, one)
        assert one.hashes[0] == other.hashes[0]
        assert held(index, other) == {0: 128}
        assert held(index, one) == {0: 256}

    def test_a_later_block_alone_is_no_prefix(self):
        index = ChainIndex()
        index.touch(0, chain(1, 2, 3))
        index.forget(0, (1,))
        assert held(index, chain(1, 2, 3)) == {}

    def test_room_for_two_blocks_evicts_its_third(self):
        index = ChainIndex()
        index.set_capacity(0, 256)
        index.touch(0, chain(1, 2, 3))
        assert held(index, chain(1, 2, 3)) == {0: 256}
        assert index.blocks(0) == 2

    def test_the_least_recently_used_leaf_goes_first(self):
        index = ChainIndex()
        index.set_capacity(0, 4 * 128)
        index.touch(0, chain(1, 2))
        index.touch(0, chain(5, 6))
        index.touch(0, chain(1, 2))
        index.touch(0, chain(8))
        assert held(index, chain(5, 6)) == {0: 128}, "the leaf of the chain used longest ago, not its root"
        assert held(index, chain(1, 2)) == {0: 256}
        assert held(index, chain(8)) == {0: 128}

    def test_less_capacity_shrinks_at_once(self):
        index = ChainIndex()
        index.touch(0, chain(1, 2, 3))
        index.set_capacity(0, 128)
        assert held(index, chain(1, 2, 3)) == {0: 128}
        assert len(index) == 1

    def test_drop_forgets_all_and_keeps_the_capacity(self):
        index = ChainIndex()
        index.set_capacity(0, 256)
        index.touch(0, chain(1, 2))
        index.touch(1, chain(1, 2))
        index.drop(0)
        assert held(index, chain(1, 2)) == {1: 256}
        index.touch(0, chain(5, 6, 7))
        assert index.blocks(0) == 2, "a restarted engine has as much room as before"

    def test_nothing_is_left_when_all_is_dropped(self):
        index = ChainIndex()
        index.touch(0, chain(1, 2))
        index.touch(3, chain(1, 9))
        index.drop(0)
        index.drop(3)
        index.drop(7)
        assert len(index) == 0

    def test_of_a_large_endpoint_nothing_matches_from_the_moment_it_is_dropped(self):
        index = ChainIndex(default_capacity_tokens=float("inf"))
        blocks = list(range(1, 3501))
        index.touch(0, chain(*blocks))
        index.touch(1, chain(1, 2))
        index.drop(0)
        assert held(index, chain(*blocks)) == {1: 256}
        assert index.blocks(0) == 0

    def test_what_it_is_given_meanwhile_counts_once_the_rest_is_gone(self):
        index = ChainIndex(default_capacity_tokens=float("inf"))
        index.touch(0, chain(*range(1, 3501)))
        index.drop(0)
        index.touch(0, chain(1, 2))
        assert held(index, chain(1, 2, 3)) == {}
        turns = 0
        while index.tidy():
            turns += 1
        assert turns > 1
        assert held(index, chain(1, 2, 3)) == {0: 256}
        assert (len(index), index.blocks(0)) == (2, 2)

    def test_dropped_again_meanwhile_it_has_nothing(self):
        index = ChainIndex(default_capacity_tokens=float("inf"))
        index.touch(0, chain(*range(1, 3501)))
        index.drop(0)
        index.touch(0, chain(1, 2))
        index.drop(0)
        while index.tidy():
            pass
        assert len(index) == 0

    def test_forgetting_what_was_never_there(self):
        index = ChainIndex()
        index.forget(0, (1, 2))
        assert index.blocks(0) == 0

    def test_an_empty_chain_matches_nothing(self):
        index = ChainIndex()
        index.touch(0, chain())
        assert held(index, chain()) == {}

    @given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 6), max_size=5)), max_size=30))
    def test_equals_a_slow_index(self, touches):
        index, slow = ChainIndex(), {}
        for slot, hashes in touches:
            unique = list(dict.fromkeys(hashes))
            index.touch(slot, chain(*unique))
            slow.setdefault(slot, set()).update(unique)
        asked = [1, 2, 3, 4]
        expected = {}
        for slot, blocks in slow.items():
            depth = next((n for n, value in enumerate(asked) if value not in blocks), len(asked))
            if depth:
                expected[slot] = depth * 128
        assert held(index, chain(*asked)) == expected

    @given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 30), unique=True, max_size=9)), max_size=30))
    def test_never_above_the_capacity(self, touches):
        index = ChainIndex(default_capacity_tokens=640)
        for slot, hashes in touches:
            index.touch(slot, chain(*hashes))
            assert index.blocks(slot) <= 5
        assert len(index) <= 20


class TestHashing:
    @pytest.mark.parametrize("change", [{"domain": "tenant/b"}, {"model": "n"}, {"adapter": "x"}])
    @pytest.mark.parametrize(
        "prompt",
        [TextPrompt(b"x" * 600), TokensPrompt(b"\1\0\0\0" * 300), BlocksPrompt(TOKENS.name, (1, 2, 3))],
        ids=["text", "tokens", "blocks"],
    )
    def test_domains_models_and_adapters_never_meet(self, prompt, change):
        mine = chain_of(request(prompt), 4.0, 4096)
        theirs = chain_of(request(prompt, **change), 4.0, 4096)
        assert mine.hashes
        assert not set(mine.hashes) & set(theirs.hashes)

    def test_a_domain_named_like_a_tenant_is_another(self):
        assert root_of("tenant/a", "m", "", TOKENS) != root_of("domain/a", "m", "", TOKENS)

    def test_full_blocks_only(self):
        assert len(chain_of(request(TextPrompt(b"x" * 511)), 4.0, 4096).hashes) == 1
        assert len(token_chain([1] * 127).hashes) == 0
        assert len(token_chain([1] * 256).hashes) == 2

    def test_depth_is_capped(self):
        assert len(chain_of(request(TextPrompt(b"x" * 4096)), 4.0, 3).hashes) == 3
        assert len(chain_of(request(BlocksPrompt(TOKENS.name, tuple(range(9)))), 4.0, 3).hashes) == 3

    def test_a_longer_prompt_extends_the_chain(self):
        short, longer = (chain_of(request(TextPrompt(b"ab" * n)), 4.0, 4096).hashes for n in (256, 512))
        assert longer[: len(short)] == short

    def test_block_tokens(self):
        assert chain_of(request(TextPrompt(b"x" * 256)), 4.0, 9).block_tokens == 64
        assert token_chain([1] * 128).block_tokens == 128
        assert chain_of(request(BlocksPrompt(TOKENS.name, (1,))), 4.0, 9).block_tokens == 128
        assert chain_of(request(BlocksPrompt(BYTES.name, (1,))), 2.0, 9).block_tokens == 128

    def test_block_hashes_are_rerooted(self):
        hashes = (11, 12, 13)
        rerooted = chain_of(request(BlocksPrompt(TOKENS.name, hashes)), 4.0, 4096).hashes
        assert not set(rerooted) & set(hashes)
        assert rerooted[:2] == chain_of(request(BlocksPrompt(TOKENS.name, hashes[:2])), 4.0, 4096).hashes

    def test_identity(self):
        prompts = [
            None, TextPrompt(b"a"), TextPrompt(b"b"), TokensPrompt(b"a"), BlocksPrompt(TOKENS.name, (1,)),
            BlocksPrompt(TOKENS.name, (2,)), BlocksPrompt(BYTES.name, (1,)),
        ]  # fmt: skip
        identities = {identity_of(request(prompt)) for prompt in prompts}
        assert len(identities) == len(prompts)
        assert identity_of(request(TextPrompt(b"a"), prompt_tokens=1)) == identity_of(
            request(TextPrompt(b"a"), prompt_tokens=9)
        ), "an estimate may change between two tries"


class TestFingerprint:
    def test_only_the_first_128_characters_count(self):
        head = "é" * 128
        assert fingerprint((head + "one").encode()) == fingerprint((head + "two").encode())
        assert fingerprint(b"x" * 127 + b"a") != fingerprint(b"y" * 127 + b"a")

    @pytest.mark.parametrize("data", [b"", b"a", b"abc", "🙂".encode(), b"\xff\xfe\xfd\xfc"])
    def test_short_and_odd_prompts_have_one(self, data):
        assert 0 <= fingerprint(data) < 2**64

    def test_similar_prompts_are_near(self):
        text = (
            "You are a helpful assistant. Answer the question of the user about the weather in the city of Paris today."
        )
        near = fingerprint(text.encode()) ^ fingerprint(text.replace("Paris", "Parma").encode())
        far = fingerprint(text.encode()) ^ fingerprint(
            b"def main(): import sys, os, json; print(sys.argv[1:], flush=True)"
        )
        assert near.bit_count() < far.bit_count()

    @pytest.mark.parametrize(("bits", "found"), [(0, True), (6, True), (7, False)])
    def test_similar_is_at_most_six_bits(self, bits, found):
        index = FingerprintIndex()
        index.touch(3, 1, 0)
        value = sum(1 << (n * 2) for n in range(bits))
        assert index.match(1, value) == (1 << 3 if found else 0)

    def test_the_nearest_wins(self):
        index = FingerprintIndex()
        index.touch(1, 1, 0b1111)
        index.touch(2, 1, 0b1)
        assert index.match(1, 0b0) == 1 << 2

    def test_roots_never_meet(self):
        index = FingerprintIndex()
        index.touch(1, 1, 5)
        assert index.match(2, 5) == 0

    def test_several_holders(self):
        index = FingerprintIndex()
        index.touch(1, 1, 5)
        index.touch(4, 1, 5)
        assert index.match(1, 5) == (1 << 1 | 1 << 4)

    def test_bounded_by_use(self):
        index = FingerprintIndex(capacity=2)
        index.touch(1, 1, 0x10)
        index.touch(2, 1, 0xFFFF)
        index.touch(1, 1, 0x10)
        index.touch(3, 1, 0xFFFF0000)
        assert len(index) == 2
        assert index.match(1, 0xFFFF) == 0
        assert index.match(1, 0x10) == 1 << 1

    def test_drop_leaves_nothing(self):
        index = FingerprintIndex()
        index.touch(1, 1, 5)
        index.touch(2, 1, 5)
        index.touch(1, 1, 0xFFFF0000FFFF)
        index.drop(1)
        assert index.match(1, 5) == 1 << 2
        assert index.match(1, 0xFFFF0000FFFF) == 0
        index.drop(2)
        assert len(index) == 0
        assert not index._bands
