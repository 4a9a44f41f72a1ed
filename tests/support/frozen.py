"""Its import keeps what the process has made by then out of all later collections of garbage.

Libraries are hundreds of thousands of objects. A collection that visits them takes half a second, and where the process
was forked it copies their pages."""

import gc

gc.collect()
gc.freeze()
