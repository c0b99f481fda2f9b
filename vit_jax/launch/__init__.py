"""Launchers: a command of vit_jax as a Slurm job, or on Cloud TPUs.

command    the command line of each process of a job, and the submission of jobs
slurm      an sbatch script
cloud_tpu  types of slices, their machines and their setup
manifests  a SkyPilot task, and a JobSet for GKE
queued     a queued resource, through gcloud
remote     the scripts that run on its machines
tpu_loop   the loop that requests machines, runs the command and starts over

The trainer depends on none of them: it finds the other processes of its job by itself.
"""
