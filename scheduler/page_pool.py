"""The free list of KV pages. Page 0 is the dummy page of padding rows and is never handed out.

Knows page numbers only: no request, no prefix, no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageError(RuntimeError):
    """A page was freed twice, or one that was never handed out: the books are wrong."""


class PagePool:
    """``num_pages`` counts the dummy page, so pages 1 .. num_pages - 1 can be held."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (one is the dummy), got {num_pages}")
        self.num_pages = num_pages
        # A stack: the page freed last is handed out first, while it may still be in a cache.
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that requests and the prefix cache share."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) if fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._is_held[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Raises PageError for a page that is not held."""
        for page in pages:
            if not 0 < page < self.num_pages or not self._is_held[page]:
                raise PageError(f"page {page} is freed but not held")
            self._is_held[page] = 0
            self._free.append(page)

    def free_pages(self) -> list[int]:
        """A copy of the free list, for integrity checks."""
        return list(self._free)
