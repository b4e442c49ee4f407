"""Ranks to test with, references to compare with, faults to inject: public, because users need them too."""
