"""Learned state in parts: what is saved, what is not, and what is left when a save ends half way."""

import asyncio
from zlib import crc32

import msgspec
import pytest
from fakes.waiting import eventually
from headway_scheduler.domain.request import TaskClass
from headway_scheduler.errors import Standby, StoreDown
from headway_scheduler.fleet.columns import Columns
from headway_scheduler.learned_state import LearnedState
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History
from headway_scheduler.learning.parts import PARTS, Parts, part_of
from headway_scheduler.learning.priors import DEFAULT
from headway_scheduler.learning.timing import Observation
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs


class Store:
    """Keeps what is saved, statement by statement; after `statements` of them it is away."""

    def __init__(self, learned=()):
        self.learned = dict(learned)
        self.sizes, self.epochs = [], []
        self.statements = None
        self.epoch = None
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def save_learned(self, states, *, epoch=None):
        await self._statement(epoch)
        self.sizes.append(sum(map(len, states.values())))
        self.learned.update(states)

    async def forget_learned(self, keys, *, epoch=None):
        await self._statement(epoch)
        for key in keys:
            self.learned.pop(key, None)

    async def _statement(self, epoch):
        self.epochs.append(epoch)
        await self.go_on.wait()
        if self.epoch is not None and epoch != self.epoch:
            raise Standby("another leads")
        if self.statements is not None:
            if not self.statements:
                raise StoreDown("away")
            self.statements -= 1


class Scheduler:
    """What of one learns and saves."""

    def __init__(self, store, endpoints=0):
        columns = Columns()
        while columns.capacity < endpoints:
            columns.grow()
        self.costs, self.history, self.store = CostModel(columns), History(), store
        self.state = LearnedState(store, {"cost_model": self.costs, "history": self.history})
        self.state.restore(store.learned)
        for slot in range(endpoints):
            self.install(slot)

    def install(self, slot, version="1"):
        self.costs.install(slot, f"e{slot} vllm", version, DEFAULT)

    def work(self, *slots, ms=90.0):
        for slot in slots:
            self.costs.observe(slot, Observation((500.0, 1.0, 5000.0, 0.0, 1.0), ms + slot / 10, 5.0))

    def serve(self, *tenants):
        for tenant in tenants:
            self.history.finished(tenant, "m", TaskClass.CHAT, 77, 1.5)

    async def save(self, epoch=None):
        await self.state.save(epoch)

    def known(self):
        """All that is learned, in no order."""
        return msgspec.json.decode(self.costs.dump()), msgspec.json.decode(self.history.dump())


def parts_of(store, kind):
    return {key: msgspec.json.decode(state) for key, state in store.learned.items() if key.startswith(f"{kind}/")}


async def test_each_part_is_a_document_of_its_own():
    before = Scheduler(Store(), 450)
    before.work(*range(450))
    before.serve("a", "b", "c")
    await before.save()
    documents = parts_of(before.store, "cost_model")
    assert len(documents) > PARTS / 2
    for key, found in documents.items():
        assert found["format"] == 1
        assert {f"cost_model/{crc32(each.rpartition(' ')[0].encode()) % 64:02}" for each in found["endpoints"]} == {key}
    after = Scheduler(before.store, 450)
    assert after.known() == before.known()
    assert after.costs.columns.tok_ms[449] == before.costs.columns.tok_ms[449] != DEFAULT.tok_ms


async def test_only_what_changed_is_saved():
    found = Scheduler(Store(), 300)
    found.work(*range(300))
    found.serve("a", "b")
    await found.save()
    saved, found.store.learned = found.store.learned, {}
    await found.save()
    assert found.store.learned == {}
    found.work(7)
    found.serve("b")
    await found.save()
    assert set(found.store.learned) == {
        f"cost_model/{part_of('e7 vllm'):02}",
        *(f"history/{part_of(key):02}" for key in ("b\0m\0chat", "\0m\0chat", "m")),
    }
    assert Scheduler(Store(saved | found.store.learned), 300).known() == found.known()


async def test_a_restart_saves_nothing_that_is_saved():
    before = Scheduler(Store(), 40)
    before.work(*range(40))
    before.serve("a")
    await before.save()
    after = Scheduler(Store(before.store.learned), 40)
    await after.save()
    assert after.store.epochs == []


async def test_statements_are_bounded():
    found = Scheduler(Store(), 2000)
    found.work(*range(2000))
    await found.save()
    assert len(found.store.sizes) > 3
    assert max(found.store.sizes) <= 128 * 1024
    assert sum(found.store.sizes) > 300_000


@pytest.mark.parametrize("statements", range(5))
async def test_a_save_that_ends_half_way_leaves_what_can_be_read_and_the_next_saves_the_rest(statements):
    found = Scheduler(Store(), 2000)
    found.work(*range(2000))
    await found.save()
    old = found.known()[0]["endpoints"]
    found.work(*range(2000), ms=95.0)
    new = found.known()[0]["endpoints"]
    found.store.statements = statements
    with pytest.raises(StoreDown):
        await found.save()
    left = Scheduler(Store(found.store.learned)).known()[0]["endpoints"]
    assert left.keys() == new.keys()
    assert all(left[key] in (old[key], new[key]) for key in left)
    assert old != new
    assert (left != old) == bool(statements)
    assert left != new
    found.store.statements = None
    await found.save()
    assert Scheduler(Store(found.store.learned)).known() == found.known()


async def test_also_one_that_is_cancelled():
    found = Scheduler(Store(), 300)
    found.work(*range(300))
    found.store.go_on.clear()
    saving = asyncio.create_task(found.save())
    await eventually(lambda: found.store.epochs)
    saving.cancel()
    await asyncio.wait([saving])
    assert found.store.learned == {}
    found.store.go_on.set()
    await found.save()
    assert Scheduler(Store(found.store.learned)).known() == found.known()


async def test_what_changes_while_it_is_saved_is_saved_next():
    found = Scheduler(Store(), 1)
    found.work(0)
    found.store.go_on.clear()
    saving = asyncio.create_task(found.save())
    await eventually(lambda: found.store.epochs)
    found.work(0, ms=85.0)
    later = asyncio.create_task(found.save())
    found.store.go_on.set()
    await asyncio.gather(saving, later)
    assert len(found.store.sizes) == 2
    assert Scheduler(Store(found.store.learned)).known() == found.known()


async def test_who_waits_for_a_save_ends_its_pauses():
    found = Scheduler(Store(), 300)
    found.work(*range(300))
    paced = asyncio.create_task(found.state.save(None, pause_s=3600.0))
    await eventually(lambda: found.state._saving.locked())
    await asyncio.gather(paced, found.save())
    assert Scheduler(Store(found.store.learned)).known() == found.known()


async def test_a_new_epoch_ends_the_save_and_takes_nothing_more():
    found = Scheduler(Store(), 2000)
    found.work(*range(2000))
    found.store.epoch = 2
    with pytest.raises(Standby):
        await found.save(epoch=1)
    assert (found.store.learned, found.store.epochs) == ({}, [1])
    await found.save(epoch=2)
    assert set(found.store.epochs) == {1, 2}
    assert Scheduler(Store(found.store.learned)).known() == found.known()


class TestVersions:
    async def test_what_the_version_before_learned_is_kept_and_its_documents_are_removed(self):
        before = Scheduler(Store(), 20)
        before.work(*range(20))
        before.serve("a")
        store = Store({"cost_model": before.costs.dump(), "history": before.history.dump(), "salt": b"1"})
        after = Scheduler(store)
        assert after.known() == before.known()
        await after.save(epoch=3)
        assert {key for key in store.learned if "/" not in key} == {"salt"}
        assert set(store.epochs) == {3}
        assert Scheduler(store).known() == before.known()

    async def test_they_stay_until_all_parts_are_saved(self):
        before = Scheduler(Store(), 2000)
        before.work(*range(2000))
        store = Store({"cost_model": before.costs.dump()})
        after = Scheduler(store)
        store.statements = 2
        with pytest.raises(StoreDown):
            await after.save()
        assert "cost_model" in store.learned
        again = Scheduler(Store(store.learned))
        assert again.known() == before.known()
        await again.save()
        assert "cost_model" not in again.store.learned
        assert Scheduler(again.store).known() == before.known()

    async def test_back_and_forth(self):
        """The version before finds nothing that it knows, learns anew, and what it learned counts afterwards."""
        first = Scheduler(Store(), 20)
        first.work(*range(20))
        await first.save()
        assert not {"cost_model", "history"} & set(first.store.learned)
        older = CostModel(first.costs.columns)
        older.install(3, "e3 vllm", "1", DEFAULT)
        older.observe(3, Observation((500.0, 1.0, 5000.0, 0.0, 1.0), 60.0, 5.0))
        store = Store(first.store.learned | {"cost_model": older.dump()})
        last = Scheduler(store)
        learned, others = last.known()[0]["endpoints"], first.known()[0]["endpoints"]
        assert learned.keys() == others.keys()
        assert {key for key in learned if learned[key] != others[key]} == {"e3 vllm 1"}
        await last.save()
        assert Scheduler(store).known() == last.known()

    async def test_of_parts_that_are_more_than_now_everything_is_kept(self):
        before = Scheduler(Store(), 3)
        before.work(0, 1, 2)
        store = Store({"cost_model/64": before.costs.dump(), "cost_model/nonsense": b"?"})
        with capture_logs() as logs:
            after = Scheduler(store)
        assert [(each["event"], each["key"]) for each in logs] == [("learned_state_ignored", "cost_model/nonsense")]
        await after.save()
        assert not {"cost_model/64", "cost_model/nonsense"} & set(store.learned)
        assert Scheduler(store).known() == before.known()


async def test_a_part_that_cannot_be_read_costs_only_itself_and_is_replaced():
    before = Scheduler(Store(), 300)
    before.work(*range(300))
    await before.save()
    spoilt = f"cost_model/{part_of('e7 vllm'):02}"
    store = Store(before.store.learned | {spoilt: b"{"})
    with capture_logs() as logs:
        after = Scheduler(store)
    assert [(each["event"], each["key"]) for each in logs] == [("learned_state_ignored", spoilt)]
    known, expected = after.known()[0]["endpoints"], before.known()[0]["endpoints"]
    assert known == {
        key: each for key, each in expected.items() if part_of(key.rpartition(" ")[0]) != part_of("e7 vllm")
    }
    await after.save()
    assert msgspec.json.decode(store.learned[spoilt]) == {"format": 1, "endpoints": {}}


async def test_the_newest_version_of_an_engine_is_the_newest_after_a_restart():
    before = Scheduler(Store(), 1)
    for version, ms in (("1", 90.0), ("2", 110.0), ("1", 90.0)):
        before.install(0, version)
        for _ in range(20):
            before.work(0, ms=ms)
        await before.save()
    taught = before.costs.columns.tok_ms[0]
    after = Scheduler(Store(before.store.learned), 1)
    after.install(0, "3")
    assert after.costs.columns.tok_ms[0] == taught


async def test_beyond_the_limit_the_oldest_goes_from_its_part():
    found = Scheduler(Store(), 5)
    found.costs.most_kept = 3
    for slot in range(5):
        found.work(slot)
        await found.save()
    found.work(0)  # it is installed still, and learns for itself
    await found.save()
    kept = {key for each in parts_of(found.store, "cost_model").values() for key in each["endpoints"]}
    assert kept == {"e2 vllm 1", "e3 vllm 1", "e4 vllm 1"}


KEYS = st.sampled_from([f"k{number}" for number in range(8)])
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["place", "remove"]), KEYS), st.tuples(st.sampled_from(["save", "fail"]), st.none())
)


@given(st.lists(ACTIONS, max_size=60))
def test_what_was_saved_is_what_there_is(actions):
    """Whatever happens between: parts that are said to be unchanged are saved as they are."""
    parts, values, saved = Parts(), {}, {}
    for number, (action, key) in enumerate(actions):
        if action == "place":
            if key not in values:
                parts.place(key)
            values[key] = number
            parts.touched.add(key)
        elif action == "remove" and key in values:
            del values[key]
            parts.remove(key)
        elif action in ("save", "fail"):
            for part in parts.changed():
                document = {each: values[each] for each in parts.take(part)}
                if action == "save":
                    saved[part] = document
                else:
                    parts.put_back(part)
        unchanged = set(range(PARTS)) - set(parts.changed())
        assert all(saved.get(part, {}) == {k: v for k, v in values.items() if part_of(k) == part} for part in unchanged)
