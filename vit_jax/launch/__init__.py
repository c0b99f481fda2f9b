"""Launchers: a command of vit_jax as a Slurm job, or on Cloud TPUs.

command    the command line of each process of the job
slurm      an sbatch script
sbatch     formats of its options
cloud_tpu  types of slices and their machines
names      what may stand in shell commands and manifests
sky        a SkyPilot task
gke        a JobSet for Kubernetes
tpu        a job on a queued resource
tpu_loop   the loop that runs it
queued     the resource, through gcloud
remote     the scripts that run on its machines
submit     submission of a script, a task or a manifest

The trainer depends on none of them: it finds the other processes of its job by itself.
"""
