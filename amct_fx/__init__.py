"""amct_fx: AMCT's quantization, pruning and distillation as a torch.fx / torch.ao-style plugin."""
