"""HARTS: agentic RL on rollout trees, each shared token computed once, exact.

The flow: `data` -> `tree` -> `plan` -> `layout` -> `layers`/`models` -> `logprobs` -> `objective` -> gradients.
`harts/step.py` runs the stages in this order.
"""

__version__ = "0.1.0"
