"""What engines' KV events say: matching, tiers, what is expected soon, and isolation."""

import numpy as np
import pytest
from fakes.rig import Binding, GpuGroup, Rig, Tenant, desired_state, spec
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.events import Stored, Tier
from headway_agent.kv.hashing import bound, chained, root_of, token_bytes
from headway_scheduler.domain.request import BlocksPrompt, TokensPrompt
from headway_scheduler.domain.telemetry import KvEvents
from headway_scheduler.errors import NoEndpoints
from headway_scheduler.index.kv import Kind, KvIndex, KvPrompt, kv_root
from headway_scheduler.index.values import NOTHING
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS = np.arange(4, dtype=np.int32)
IDS = list(range(1024))
ROOT = kv_root("", "")
COSTS = (0.0, 1.0, 10.0, 100.0)


def data(ids):
    return np.array(ids, "<u4").tobytes()


def prompt(ids=IDS, kind=Kind.IDS):
    return KvPrompt.of_ids(data(ids), 4096, kind)


KEYS = prompt().keys(ROOT)


def feed(index, slot, stored=(), removed=(), *, tier="gpu", cleared=False, complete=True):
    index.apply(slot, tier, stored, removed, cleared=cleared, complete=complete)


def match(index, of=None, roots=((ROOT, 0b1111),), now=0.0, approximate=NOTHING):
    return index.match(of or prompt(), roots, approximate, now)


def held(index, **changes):
    return match(index, **changes).tokens(SLOTS, 16).astype(int).tolist()


def test_the_agent_and_the_scheduler_compute_the_same_keys():
    content, keys = 0, []
    for start in range(0, 1024, 128):
        content = chained(token_bytes(IDS[start : start + 128]), content)
        keys.append(bound(content, root_of("sql", "salt")))
    assert prompt().keys(kv_root("sql", "salt")) == keys


def test_the_longest_prefix_of_every_endpoint():
    index = KvIndex()
    feed(index, 0, KEYS)
    feed(index, 1, KEYS[:3])
    feed(index, 2, KEYS[1:])
    assert held(index) == [1024, 384, 0, 0]
    feed(index, 0, removed=KEYS[2:3])
    assert held(index) == [256, 384, 0, 0]
    index.drop(1)
    assert held(index) == [256, 0, 0, 0]
    assert (index.blocks(0), index.blocks(1)) == (7, 0)


def test_removing_what_is_not_held_changes_nothing():
    index = KvIndex()
    feed(index, 0, KEYS[:2], KEYS[5:])
    feed(index, 1, (), KEYS)
    assert held(index) == [256, 0, 0, 0]


def test_a_prefix_in_a_farther_tier_costs_its_transfer():
    index = KvIndex()
    feed(index, 0, KEYS[:2])
    feed(index, 0, KEYS[2:5], tier="cpu")
    feed(index, 0, KEYS[5:6], tier="disk")
    feed(index, 1, KEYS[:6])
    found = match(index)
    assert found.tokens(SLOTS, 16).tolist() == [768, 768, 0, 0]
    assert found.transfer_ms(SLOTS, 16, COSTS).tolist() == [3 * 128 + 1280, 0, 0, 0]


def test_without_farther_tiers_nothing_is_transferred():
    index = KvIndex()
    feed(index, 0, KEYS)
    assert match(index).transfer_ms(SLOTS, 16, COSTS) is None


def test_a_feed_is_believed_once_it_has_shown_that_it_speaks_of_what_we_ask():
    index = KvIndex()
    feed(index, 0, KEYS[:1])
    feed(index, 1, prompt([5] * 256).keys(ROOT))
    everywhere = type(NOTHING)(((0b11, 4),), 128.0)
    assert held(index, approximate=everywhere) == [128, 512, 0, 0], "0 matched; 1 has shown nothing yet"
    assert held(index, of=prompt(kind=Kind.TEXT), approximate=everywhere) == [128, 512, 0, 0]
    assert held(index, of=prompt([7] * 256), approximate=everywhere) == [0, 512, 0, 0]


def test_one_domains_match_proves_nothing_for_another():
    index, other = KvIndex(), kv_root("", "a plane forgets this one")
    feed(index, 0, KEYS)
    everywhere = type(NOTHING)(((0b1, 4),), 128.0)
    assert held(index)[0] == 1024
    assert held(index, roots=((other, 0b1),), approximate=everywhere)[0] == 512
    assert held(index, of=prompt([7] * 256), approximate=everywhere)[0] == 0


def test_a_feed_with_a_gap_in_its_history_is_a_lower_bound():
    index = KvIndex()
    feed(index, 0, KEYS[:1], complete=False)
    everywhere = type(NOTHING)(((0b1, 4),), 128.0)
    assert held(index, approximate=everywhere)[0] == 512
    feed(index, 0, KEYS[:6], complete=True)
    assert held(index, approximate=everywhere)[0] == 768


def test_a_feed_that_was_forgotten_is_a_lower_bound_until_it_begins_anew():
    index = KvIndex()
    everywhere = type(NOTHING)(((0b1, 4),), 128.0)
    feed(index, 0, KEYS[:1])
    index.forget(0)
    feed(index, 0, KEYS[:1])
    assert held(index, approximate=everywhere)[0] == 512
    feed(index, 0, KEYS[:1], cleared=True)
    assert held(index, approximate=everywhere)[0] == 128


def test_no_feed_fills_the_memory():
    index = KvIndex(most_blocks=3)
    feed(index, 0, KEYS[:2])
    feed(index, 0, KEYS[2:5])
    assert (index.blocks(0), len(index)) == (2, 2)
    assert held(index, approximate=type(NOTHING)(((0b1, 4),), 128.0))[0] == 512, "it is known not to be all"


def test_what_was_given_to_an_endpoint_counts_until_events_or_time_say_otherwise():
    index = KvIndex()
    feed(index, 0)
    feed(index, 1)
    index.expect(0, prompt(), ROOT, until=5.0)
    index.expect(3, prompt(), ROOT, until=5.0)
    assert held(index, now=4.9) == [1024, 0, 0, 0], "3 has no feed: the approximate image is all there is"
    feed(index, 0, KEYS[:2])
    assert held(index, now=5.1) == [256, 0, 0, 0]
    index.expect(0, prompt(), ROOT, until=9.0)
    index.expect(0, prompt(), ROOT, until=12.0)
    feed(index, 0, removed=KEYS[6:])
    assert held(index, now=6.0) == [768, 0, 0, 0]
    assert held(index, now=10.0) == [768, 0, 0, 0], "the later of two decisions counts"
    feed(index, 0, cleared=True)
    assert held(index, now=10.0) == [0, 0, 0, 0]
    assert len(index) == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["gpu", "cpu"]), st.booleans(), st.integers(0, 7), st.booleans()),
        max_size=40,
    )
)
def test_the_index_is_what_a_plain_set_of_blocks_says(steps):
    index, plain = KvIndex(), {}
    for slot, tier, store, at, clear in steps:
        keys = KEYS[at : at + 3]
        if clear:
            plain = {k: v for k, v in plain.items() if k[0] != slot}
        for key in keys:
            plain[slot, tier, key] = store
        feed(index, slot, keys if store else (), () if store else keys, tier=tier, cleared=clear)
    for slot in range(4):
        here = {key for (of, _, key), there in plain.items() if there and of == slot}
        depth = next((n for n, key in enumerate(KEYS) if key not in here), len(KEYS))
        assert held(index)[slot] == depth * 128
        assert index.blocks(slot) == sum(there for (of, _, _), there in plain.items() if of == slot)


# Through the scheduler


def events(of, stored=(), removed=(), **changes):
    return KvEvents(of, 1, "tokens-xxh3-128", tuple(stored), tuple(removed), **changes)


class Fleet(Rig):
    """A rig whose engines publish; prompts are token ids."""

    def publish(self, number, ids=IDS, salt=None, tenant="default", **changes):
        """This engine stored a prompt of the tenant, under the salt it was given or another one."""
        endpoint = self.fleet.endpoints[f"10.0.0.{number}:8000@0"]
        domain = self.scheduler.intake.desired.tenants[tenant].domain
        if salt is None:
            salt = self.scheduler.salts.salt(domain, endpoint.spec.engine)
        keys = prompt(ids).keys(kv_root("", salt))
        self.scheduler.core.apply_kv_events(endpoint, events(endpoint.id, keys, **changes))

    def ask(self, ids=IDS, tenant="default", **changes):
        request = self.request(tenant=tenant, prompt=TokensPrompt(data(ids)), prompt_tokens=len(ids), **changes)
        tenants = self.scheduler.intake.desired.tenants
        return self.dispatcher.submit(request, tenants[tenant], self.owner, self.clock.now)

    def matched(self, ids=IDS, **changes):
        """Matched tokens by endpoint, as Explain tells them."""
        request = self.request(prompt=TokensPrompt(data(ids)), prompt_tokens=len(ids), **changes)
        rows = self.dispatcher.explain(request, "", self.owner, self.clock.now, whole=True).rows
        return {int(self.where_of(row.endpoint)): row.matched_tokens for row in rows if row.matched_tokens}


def rig(**changes):
    return Fleet(desired_state("prefix_match", **changes))


def test_a_prompt_of_ids_goes_where_events_say_it_is():
    one = rig()
    one.endpoints(3, engine="vllm")
    one.publish(2)
    decision = one.ask()
    assert one.where(decision) == "2"
    assert decision.why.matched_tokens == 1023, "the last token is computed in any case"


def test_hashes_that_chain_from_nothing_are_matched_too():
    one = rig()
    one.endpoints(3, engine="vllm")
    one.publish(3)
    request = one.request(prompt=BlocksPrompt("tokens-xxh3-128", tuple(prompt().contents)), prompt_tokens=1024)
    assert one.where(one.submit(request)) == "3"


def test_an_endpoint_that_restarted_or_left_is_forgotten():
    one = rig()
    one.endpoints(2, engine="vllm", engine_boot_id="1")
    one.publish(1)
    one.publish(2)
    node = one.fleet.nodes["n"]
    one.fleet.put_endpoint(node, spec(1, engine="vllm", engine_boot_id="2"))
    assert one.matched() == {2: 1024}
    one.fleet.remove_endpoint("10.0.0.2:8000@0")
    assert (one.matched(), len(one.scheduler.kv)) == ({}, 0)


def test_an_agent_that_comes_back_without_its_feeds_leaves_nothing_behind():
    one = rig()
    one.endpoints(1, engine="vllm")
    one.publish(1)
    one.endpoints(1, engine="vllm")
    assert one.matched() == {}


def test_an_empty_cache_ends_what_was_believed_but_a_feed_that_begins_does_not():
    one = rig()
    one.endpoints(1, engine="vllm")
    one.route(text="x" * 4096)
    index = one.scheduler.index
    before = index.blocks(0)
    one.publish(1, cleared=True)
    assert index.blocks(0) == before > 0
    endpoint = one.fleet.by_slot[0]
    one.scheduler.core.apply_kv_events(endpoint, events(endpoint.id, cleared=True, complete=False))
    assert index.blocks(0) == before, "a gap says nothing about what is there"
    one.scheduler.core.apply_kv_events(endpoint, events(endpoint.id, cleared=True))
    assert index.blocks(0) == 0


def test_adaptive_counts_the_transfer():
    one = Fleet(desired_state("adaptive"))
    one.endpoints(2, engine="vllm")
    ids = list(range(128 * 40))
    one.publish(1, ids, tier="disk")
    one.publish(2, ids)
    rows = one.dispatcher.explain(
        one.request(prompt=TokensPrompt(data(ids)), prompt_tokens=len(ids)), "", one.owner, one.clock.now, whole=True
    ).rows
    ttft = {int(one.where_of(row.endpoint)): row.predicted_ttft_ms for row in rows}
    assert ttft[1] == pytest.approx(ttft[2] + len(ids) * 0.05)
    empty = one.matched(list(range(9, 9 + 5120)))
    assert empty == {}


@pytest.mark.parametrize(("pulls", "named"), [((True, True), "1"), ((True, False), None), ((False, True), None)])
def test_a_better_holder_is_named_where_both_can_move_prefixes(pulls, named):
    one = Fleet(desired_state("least_request"))
    one.connect("n", *(spec(n, engine="vllm", pulls_prefixes=can) for n, can in zip((1, 2), pulls, strict=True)))
    one.publish(1)
    one.publish(2, IDS[:128])
    one.route(subset=None, text="x")  # keeps the first busy
    decision = one.ask()
    assert one.where(decision) == "2"
    holder = decision.pull_from
    assert (None if holder is None else holder.placement.spec.address.split(":")[0][-1]) == named
    assert holder is None or holder.tokens == 1024


def two_tenants(**changes):
    return rig(
        tenants=[
            Tenant("a"),
            Tenant("b"),
            Tenant("a2", isolation_domain="shared"),
            Tenant("b2", isolation_domain="shared"),
        ],
        groups=[GpuGroup("one", endpoints=("10.0.0.1:8000@0",))],
        bindings=[Binding(t, "all") for t in ("a", "b", "a2", "b2")],
        **changes,
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang", "emulator"])
def test_no_tenant_sees_anothers_prefixes(engine):
    one = two_tenants()
    one.endpoints(3, engine=engine)
    one.publish(1, tenant="a")
    one.publish(2, salt="")
    salted = engine != "sglang"
    assert one.matched(tenant="a") == ({1: 1024} if salted else {})
    for other in ("b", "a2", "default"):
        assert one.matched(tenant=other) == {}


def test_those_of_one_domain_share():
    one = two_tenants()
    one.endpoints(2, engine="vllm")
    one.publish(1, tenant="a2")
    assert one.matched(tenant="b2") == {1: 1024}


def test_unsalted_blocks_count_on_an_endpoint_that_serves_one_domain_alone():
    one = two_tenants()
    one.endpoints(2, engine="sglang")
    one.publish(1, salt="")
    assert one.matched(tenant="a") == {}
    bindings = (*one.store.desired.bindings, Binding("a", "one", "dedicated"))
    one.desire(bindings=bindings)
    assert one.matched(tenant="a") == {}, "what it held before may have been others'"
    one.publish(1, salt="")
    assert one.matched(tenant="a") == {1: 1024}
    assert one.matched(tenant="b") == {}
    one.desire(bindings=(*bindings[:-1], Binding("b", "one", "dedicated")))
    assert one.matched(tenant="b") == {}, "those are a's"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 3)), min_size=1, max_size=12),
    st.sampled_from(["vllm", "sglang"]),
)
def test_whatever_engines_store_for_one_tenant_another_matches_none_of_it(stored, engine):
    """Prompts of two tenants in any order, given to engines as the scheduler says, seen by an agent's own block set."""
    one = two_tenants()
    one.endpoints(2, engine=engine)
    sets = {1: BlockSet(complete=True), 2: BlockSet(complete=True)}
    mine = {"a": set(), "b": set()}
    for tenant, number, which in stored:
        ids = [which] * 512
        salt = one.scheduler.salts.salt(f"tenant/{tenant}", engine)
        extras = ((salt,),) if salt else ()
        names = tuple(f"{tenant if salt else ''}{which}-{n}".encode() for n in range(32))
        sets[number].apply(Stored(names, None, tuple(ids), 16, extras=extras))
        mine[tenant].add((number, which))
    for number, blocks in sets.items():
        endpoint = one.fleet.endpoints[f"10.0.0.{number}:8000@0"]
        keys = [key for tier, key in blocks.held() if tier is Tier.GPU]
        one.scheduler.core.apply_kv_events(endpoint, events(endpoint.id, keys, cleared=True))
    for tenant in "ab":
        for which in range(4):
            expected = {number: 512 for number, of in mine[tenant] if of == which} if engine == "vllm" else {}
            assert one.matched([which] * 512, tenant=tenant) == expected


def test_a_plane_without_salts_gets_only_what_serves_its_domain_alone():
    one = two_tenants()
    one.endpoints(2, engine="vllm")
    with pytest.raises(NoEndpoints, match="alone"):
        one.ask(tenant="a", cannot_inject_salt=True)
    one.desire(bindings=(*one.store.desired.bindings, Binding("a", "one", "dedicated")))
    one.publish(1, salt="")
    decision = one.ask(tenant="a", cannot_inject_salt=True)
    assert (one.where(decision), decision.why.matched_tokens) == ("1", 1023)
    with pytest.raises(NoEndpoints):
        one.ask(tenant="b", cannot_inject_salt=True)
