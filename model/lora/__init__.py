"""LoRA adapters: reading of PEFT directories, and their matrices for the model's layers."""
