"""Training: trainers on top (`rl`, `sft`, `preference`), and below them one package for each part of a step."""
