"""Real tokens: checks of a connector in the installed vLLM, with tiny models that kvview makes.

    kvview check TARGET --inference

The traffic (:mod:`.traffic`) is first served without the connector. With the connector the tokens
must be the same. The loads of the connector must have an effect, so a fault that kvview injects
into the loads must change tokens.
"""

from kvview_vllm.inference.check import check_tokens

__all__ = ["check_tokens"]
