"""``python -m duograph.scheduler``: the engine process, with the collector off until it is ready.

Imports, the trace of the model and captures make a million objects that stay; walking them again
and again took 1 s of a 17 s start. ``process.py`` collects once, when the start is over, and
switches the collector on.
"""

from __future__ import annotations

import gc

gc.disable()  # before the imports, which are a third of the start

from duograph.scheduler.process import leave, main  # noqa: E402

if __name__ == "__main__":
    leave(main())
