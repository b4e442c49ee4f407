"""Python runs this first in each process that a test starts (PYTHONPATH of tests/conftest.py).

Such a process imports torch and ends soon: a third of its CPU time would be garbage collections, which find nothing.
"""

import atexit
import gc

gc.set_threshold(200_000, 20, 100)  # as the command `ranvier` does
atexit.register(gc.freeze)  # the collections of the interpreter's end look at no object
