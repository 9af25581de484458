"""What knows the challenge's data: its repository, its names, its manifest and its scripts."""

REPO, PREFIX = "willdepueoai/parameter-golf", "datasets"  # on the Hugging Face hub, and the folder in it
REPO_VARIABLE, PREFIX_VARIABLE = "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
