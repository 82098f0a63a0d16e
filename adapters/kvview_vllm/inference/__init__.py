"""Real tokens: a connector in the installed vLLM, with tiny models made on the spot.

    kvview check TARGET --inference

What is served (:mod:`.traffic`) is served without the connector first. With it the tokens must
be the same, and what it loads must matter: a fault of ours, planted over it, must change them.
"""

from kvview_vllm.inference.check import check_tokens

__all__ = ["check_tokens"]
