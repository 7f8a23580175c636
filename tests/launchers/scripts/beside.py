"""What a script and a schedule import from beside the script."""

from partbook.schedules import gpt2 as module

gpt2 = module.gpt2
