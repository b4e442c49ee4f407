"""AutoCache: outputs of frozen blocks are stored on disk and read instead of computed again."""
