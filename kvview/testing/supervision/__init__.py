"""The supervision of single calls: time limits, yields between threads, and source lines."""
