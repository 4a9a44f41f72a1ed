"""Workers of a stage: threads, or processes that return what they make through shared memory."""
