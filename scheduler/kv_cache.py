"""The KV pages of requests: the page pool and the prefix cache behind one door.

A ``PageLease`` is what one request holds. Its pages, in order of position, are

    [0, shared)          the tree's, protected by the lease's lock on it
    [shared, len(pages)) the lease's own

Free + held by leases + in the tree = all pages but the dummy. A page is never kept twice: when
a prefix is published that the tree has meanwhile got from another request, the lease changes
over to the tree's pages, or a request could hold more than its length and starve itself. Knows
no request state and no policy; ``available`` is all a policy needs to ask.
"""

from __future__ import annotations

from duograph.scheduler.page_pool import PagePool
from duograph.scheduler.radix_cache import Node, RadixCache


class PageLease:
    """Pages of one request. Only KVCache changes it."""

    __slots__ = ("end", "num_cached_pages", "pages", "shared")

    def __init__(self, pages: list[int], end: Node | None, shared: int) -> None:
        self.pages = pages
        self.end = end  # locked node of the tree, or None
        self.shared = shared
        self.num_cached_pages = shared  # found in the tree when the lease was opened

    @property
    def num_own_pages(self) -> int:
        """Pages that only this lease holds."""
        return len(self.pages) - self.shared


class KVCache:
    """``num_pages`` counts the dummy page 0."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixCache(page_size)
        self.has_prefix_cache = prefix_cache

    @property
    def available(self) -> int:
        """Pages that could be handed out now: free ones and cached ones nobody uses."""
        return self.pool.num_free + self.tree.evictable_pages

    @property
    def held_tokens(self) -> int:
        """Tokens' worth of pages in use by requests."""
        return (self.pool.num_usable - self.available) * self.page_size

    def match(self, namespace: str, key: bytes, limit: int | None = None) -> int:
        """Cached tokens a request with these tokens would find, ``limit`` at most."""
        return self.tree.probe(namespace, key, self._reusable(key, limit))[0] * self.page_size

    def cost(self, namespace: str, key: bytes, limit: int | None = None) -> int:
        """By how many pages ``available`` would fall if ``open`` were called."""
        matched, evictable = self.tree.probe(namespace, key, self._reusable(key, limit))
        return self.pages_for(len(key) // 4) - matched + evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def open(self, namespace: str, key: bytes, limit: int | None = None) -> PageLease | None:
        """Pages for all tokens of ``key`` (int32 bytes), cached prefix first; None if they are
        not available. At least one token is left to compute, since the step needs its logits,
        and ``limit`` tokens at most come from the cache."""
        end, cached = self.tree.lock_prefix(namespace, key, self._reusable(key, limit))
        try:
            own = self._allocate(self.pages_for(len(key) // 4) - len(cached))
        except BaseException:
            if end is not None:
                self.tree.unlock(end)
            raise
        if own is None:
            if end is not None:
                self.tree.unlock(end)
            return None
        return PageLease(cached + own, end, len(cached))

    def grow(self, leases: list[PageLease]) -> bool:
        """One more page for each; False, and nothing given, if too few are available."""
        pages = self._allocate(len(leases))
        if pages is None:
            return False
        for lease, page in zip(leases, pages, strict=True):
            lease.pages.append(page)
        return True

    def publish(self, lease: PageLease, namespace: str, key: bytes) -> list[tuple[int, int]]:
        """Lets others find the whole pages of ``key``, whose keys and values are computed.

        Returns (position in the lease, page) where the lease's page was exchanged for one of
        the tree's with the same content; its own is free then.
        """
        count = len(key) // (4 * self.page_size)
        if not self.has_prefix_cache or count <= lease.shared:
            return []
        mine = lease.pages[:count]
        end, theirs = self.tree.insert(namespace, key[: count * 4 * self.page_size], mine)
        if lease.end is not None:
            self.tree.unlock(lease.end)
        lease.end, lease.shared = end, count
        if mine == theirs:
            return []
        lease.pages[:count] = theirs
        exchanged = [at for at in range(count) if mine[at] != theirs[at]]
        self.pool.free([mine[at] for at in exchanged])
        return [(at, theirs[at]) for at in exchanged]

    def close(self, lease: PageLease, computed_tokens: int) -> list[int]:
        """Ends the lease. Returns the pages that a step in flight may still write, from the one
        after the last whole computed page on; they go to ``pool.free`` when that step is over."""
        whole = max(computed_tokens // self.page_size, lease.shared)
        late = lease.pages[whole:]
        self.pool.free(lease.pages[lease.shared : whole])
        if lease.end is not None:
            self.tree.unlock(lease.end)
        lease.pages, lease.end, lease.shared = [], None, 0
        return late

    def check(self, leases: list[PageLease], late: list[int]) -> list[int]:
        """The tree's pages. Raises AssertionError unless every page is in exactly one place."""
        held = [page for lease in leases for page in lease.pages[lease.shared :]]
        cached = self.tree.check()
        everywhere = self.pool.free_pages() + cached + held + late
        if sorted(everywhere) != list(range(1, self.pool.num_pages)):
            raise AssertionError(
                f"pages lost or in two places: {self.pool.num_free} free, {len(held)} held, "
                f"{len(cached)} cached, {len(late)} late, "
                f"{self.pool.num_usable} in all"
            )
        return cached

    def clear(self) -> int:
        """Empties the prefix cache, but for what leases hold; returns the pages freed."""
        pages = self.tree.evict(self.tree.evictable_pages)
        self.pool.free(pages)
        return len(pages)

    def _reusable(self, key: bytes, limit: int | None) -> int:
        tokens = len(key) // 4 - 1
        return (tokens if limit is None else min(tokens, limit)) // self.page_size

    def _allocate(self, count: int) -> list[int] | None:
        short = count - self.pool.num_free
        if short > 0:
            if short > self.tree.evictable_pages:
                return None
            self.pool.free(self.tree.evict(short))
        return self.pool.allocate(count)
