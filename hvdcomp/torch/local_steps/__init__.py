"""`LocalSteps`: its schedule, its exchange, and models in FSDP2."""
