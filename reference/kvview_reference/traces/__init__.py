"""Request traces of real LLM traffic: one reader for ``kvview replay`` and ``kvview size``.

Commands call :func:`kvview_reference.traces.reader.read_trace`.
"""
