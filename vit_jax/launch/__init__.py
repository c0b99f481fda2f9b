"""Launchers: a command of vit_jax as a Slurm job, or on TPUs that SkyPilot rents.

command   what is launched, as each process of the job runs it
slurm     an sbatch script
sky       a SkyPilot task
submit    either of them, handed to its program

The trainer knows none of them: it finds the other processes of its job by itself.
"""
