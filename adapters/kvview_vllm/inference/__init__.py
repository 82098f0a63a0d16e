"""Real tokens: checks of a connector in the installed vLLM, with tiny models that kvview makes.

    kvview check TARGET --inference

The traffic (:mod:`.traffic`) is first served without the connector. It is then served with the
connector, and the tokens must be the same. To prove that the loads affect the tokens, kvview also
injects a fault into the loads, which must change tokens.
"""

from kvview_vllm.inference.check import check_tokens as check_tokens
