"""Launchers: a command of vit_jax as a Slurm job, or on TPUs that SkyPilot rents.

command   the command line of each process of the job
slurm     an sbatch script
sbatch    formats of its options
sky       a SkyPilot task
submit    submission of either

The trainer depends on none of them: it finds the other processes of its job by itself.
"""
