"""What differs between vLLM releases, probed once: nothing outside decides by a release."""
