"""Real tokens: a connector in the installed vLLM, with tiny models made on the spot.

    kvview check TARGET --inference

The traffic (:mod:`.traffic`) is served without the connector first. With it the tokens must be
the same, and its loads must matter: a fault that kvview injects into them must change tokens.
"""

from kvview_vllm.inference.check import check_tokens

__all__ = ["check_tokens"]
