"""kvview on vLLM: real vLLM objects of every release, wrapped; imports no vLLM by itself."""
