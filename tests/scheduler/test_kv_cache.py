"""Page pool, radix cache and KV cache: hypothesis against models that are plain dicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from duograph.scheduler.kv_cache import KVCache, PageLease
from duograph.scheduler.page_pool import PageError, PagePool
from duograph.scheduler.radix_cache import RadixCache

PAGE = 2
LIMITED = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def key(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class PoolMachine(RuleBasedStateMachine):
    """The pool hands out each page once and takes back only what it handed out."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.out: set[int] = set()

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count: int):  # type: ignore[no-untyped-def]
        pages = self.pool.allocate(count)
        if count > 8 - len(self.out):
            assert pages is None
            return multiple()
        assert pages is not None and len(pages) == count
        assert not self.out & set(pages) and 0 not in pages
        self.out |= set(pages)
        return multiple(*pages)

    @rule(page=held)
    def free(self, page: int) -> None:
        if page in self.out:
            self.pool.free([page])
            self.out.remove(page)
        else:
            with pytest.raises(PageError):
                self.pool.free([page])

    @rule(page=st.sampled_from([-1, 0, 9, 100]))
    def free_nonsense(self, page: int) -> None:
        with pytest.raises(PageError):
            self.pool.free([page])

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_free == 8 - len(self.out)
        assert sorted([*self.pool.free_pages(), *self.out]) == list(range(1, 9))


class RadixMachine(RuleBasedStateMachine):
    """The tree is a set of prefixes, each with the page of its last tokens."""

    locks = Bundle("locks")
    tokens = st.lists(st.integers(0, 1), min_size=PAGE, max_size=6 * PAGE)
    names = st.sampled_from(["", "salt"])

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixCache(PAGE)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}  # prefix -> page
        self.locked: list[tuple[str, tuple[int, ...]]] = []
        self.next_page = 1

    def known(self, name: str, tokens: list[int], limit: int) -> int:
        count = 0
        while count < limit and (name, tuple(tokens[: (count + 1) * PAGE])) in self.model:
            if (count + 1) * PAGE > len(tokens):
                break
            count += 1
        return count

    @rule(target=locks, name=names, tokens=tokens)
    def insert(self, name: str, tokens: list[int]):  # type: ignore[no-untyped-def]
        count = len(tokens) // PAGE
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        end, theirs = self.tree.insert(name, key(tokens[: count * PAGE]), pages)
        for at in range(count):
            prefix = (name, tuple(tokens[: (at + 1) * PAGE]))
            self.model.setdefault(prefix, pages[at])
            assert theirs[at] == self.model[prefix]
        self.locked.append((name, tuple(tokens[: count * PAGE])))
        return (end, self.locked[-1])

    @rule(target=locks, name=names, tokens=tokens, limit=st.integers(0, 6))
    def lock(self, name: str, tokens: list[int], limit: int):  # type: ignore[no-untyped-def]
        count = self.known(name, tokens, min(limit, len(tokens) // PAGE))
        matched, evictable = self.tree.probe(name, key(tokens), limit)
        assert matched == count
        before = self.tree.evictable_pages
        end, pages = self.tree.lock_prefix(name, key(tokens), limit)
        assert before - self.tree.evictable_pages == evictable
        assert pages == [self.model[name, tuple(tokens[: (i + 1) * PAGE])] for i in range(count)]
        if end is None:
            assert count == 0
            return multiple()
        self.locked.append((name, tuple(tokens[: count * PAGE])))
        return (end, self.locked[-1])

    @rule(entry=consumes(locks))  # a node is unlocked once for each time it was locked
    def unlock(self, entry) -> None:  # type: ignore[no-untyped-def]
        end, prefix = entry
        self.locked.remove(prefix)
        self.tree.unlock(end)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        evictable = self.tree.evictable_pages
        evicted = self.tree.evict(count)
        assert len(evicted) == min(count, evictable)
        gone = set(evicted)
        protected = {
            (name, tokens[:length])
            for name, tokens in self.locked
            for length in range(PAGE, len(tokens) + 1, PAGE)
        }
        for prefix in [prefix for prefix, page in self.model.items() if page in gone]:
            assert prefix not in protected, "a locked prefix was evicted"
            del self.model[prefix]

    @invariant()
    def same_pages(self) -> None:
        assert sorted(self.tree.check()) == sorted(self.model.values())
        for name, tokens in self.model:
            assert len(tokens) == PAGE or (name, tokens[:-PAGE]) in self.model


class CacheMachine(RuleBasedStateMachine):
    """Leases over pool and tree: pages add up, and one content is one page."""

    leases = Bundle("leases")
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(16, PAGE, prefix_cache=True)
        self.open_leases: list[PageLease] = []

    @rule(target=leases, tokens=tokens)
    def open(self, tokens: list[int]):  # type: ignore[no-untyped-def]
        cost, available = self.kv.cost("", key(tokens)), self.kv.available
        lease = self.kv.open("", key(tokens))
        if lease is None:
            assert cost > available
            return multiple()
        assert self.kv.available == available - cost
        assert len(lease.pages) == -(-len(tokens) // PAGE)
        assert lease.num_cached_pages * PAGE < len(tokens)
        self.open_leases.append(lease)
        return (lease, tokens)

    @rule(entry=leases, computed=st.integers(0, 12))
    def publish(self, entry, computed: int) -> None:  # type: ignore[no-untyped-def]
        lease, tokens = entry
        if lease in self.open_leases:
            before = list(lease.pages)
            changes = self.kv.publish(lease, "", key(tokens[:computed]))
            for at, page in changes:
                before[at] = page
            assert before == lease.pages

    @rule(entry=leases)
    def grow(self, entry) -> None:  # type: ignore[no-untyped-def]
        lease, tokens = entry
        if lease in self.open_leases and len(lease.pages) * PAGE <= len(tokens):
            available = self.kv.available
            assert self.kv.grow([lease]) == (available > 0)

    @rule(entry=leases, computed=st.integers(0, 12))
    def close(self, entry, computed: int) -> None:  # type: ignore[no-untyped-def]
        lease, _ = entry
        if lease in self.open_leases:
            self.open_leases.remove(lease)
            late = self.kv.close(lease, computed)
            self.kv.check(self.open_leases, late)
            self.kv.pool.free(late)

    @invariant()
    def adds_up(self) -> None:
        self.kv.check(self.open_leases, [])


TestPool = PoolMachine.TestCase
TestPool.settings = LIMITED
TestRadix = RadixMachine.TestCase
TestRadix.settings = LIMITED
TestCache = CacheMachine.TestCase
TestCache.settings = LIMITED
for machine in (TestPool, TestRadix, TestCache):
    machine.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]


def test_the_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    tree = RadixCache(PAGE)
    for tokens, pages in (([1, 1, 1, 1], [1, 2]), ([2, 2, 2, 2], [3, 4]), ([3, 3], [5])):
        tree.unlock(tree.insert("", key(tokens), pages)[0])
    end, _ = tree.lock_prefix("", key([1, 1]), 1)  # the first half is used again
    assert end is not None
    tree.unlock(end)
    assert tree.evict(1) == [2], "the tail that nobody used since"
    assert tree.evict(1) == [4]
    assert tree.evict(5) == [3, 5, 1]
    assert tree.cached_pages == 0


def test_stale_entries_of_the_eviction_heap_do_not_pile_up() -> None:
    tree = RadixCache(PAGE)
    tree.unlock(tree.insert("", key([1, 1]), [1])[0])
    for _ in range(10_000):
        end, _ = tree.lock_prefix("", key([1, 1]), 1)
        assert end is not None
        tree.unlock(end)
    assert len(tree._heap) < 200


def test_a_namespace_that_has_been_evicted_leaves_nothing_behind() -> None:
    tree = RadixCache(PAGE)
    for index in range(1_000):
        tree.unlock(tree.insert(f"salt {index}", key([1, 1]), [index])[0])
    assert len(tree.evict(1_000)) == 1_000
    assert not tree._roots and tree.cached_pages == 0


def test_a_long_prompt_matches_to_the_page() -> None:
    tree = RadixCache(16)
    tokens = np.arange(100_000, dtype=np.int32)
    tree.unlock(tree.insert("", tokens.tobytes(), list(range(1, 6_251)))[0])
    changed = tokens.copy()
    changed[50_000] = -1
    assert tree.probe("", tokens.tobytes(), 10**6) == (6_250, 6_250)
    assert tree.probe("", changed.tobytes(), 10**6) == (3_125, 3_125)
