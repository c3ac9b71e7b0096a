"""Tests of distillation; the acceptance tests of spec/distillation.md section 14 and their files:

| | test |
|---|---|
| T1 | test_amct_pytorch_distill.py: an empty cfg and none give the same JSON |
| T2, T3 | test_groups.py: units in a row; test_amct_pytorch.py and config/test_distill.py: JSON |
| T4 | test_distill.py: a skipped layer; config/test_samples.py: its JSON |
| T5 | test_rules.py: precedence |
| T6 | test_groups.py: a group that does not fit; test_bad_input.py |
| T7 | test_rules.py, test_bad_input.py, test_tables.py, config/test_distill.py |
| T8 | test_distill.py: the teacher is the same afterwards |
| T9 | test_optimizers.py: a trained network comes closer |
| T10 | test_cache.py: data_dump, nothing stays after an error |
| T11 | test_blocks.py: the input choice |
| T12 | test_optimizers.py: hyper-parameters survive, every optimizer can be rebuilt |
| T13 | test_distill.py: functions, Dropout and skips; tuples and several inputs |
| T14 | test_groups.py and test_distill.py: groups of the user win |
| T15 | test_optimizers.py: learned scales; test_amct_pytorch_distill.py: the saved scales |
| T16 | test_optimizers.py: small updates accumulate |
| T17 | test_ddp.py |
| T18, T19 | test_rules.py: a missing half, channel_wise |
| T20 | test_distill.py: teacher once per batch, a calibrated student; test_cache.py: dtypes |
| always | test_blocks.py: a block equals the same slice |
"""
