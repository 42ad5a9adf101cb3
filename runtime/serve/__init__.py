"""An OpenAI-compatible HTTP endpoint on the scheduler, for machines without Triton."""
