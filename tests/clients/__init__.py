"""Tier stores under LMCache and SGLang."""
