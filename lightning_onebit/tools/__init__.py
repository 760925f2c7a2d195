"""What people plan, check, measure and migrate with: the commands of ``lightning-onebit``, and ``from_deepspeed_config``."""
