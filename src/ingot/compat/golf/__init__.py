"""The parameter golf challenge: its training scripts, configured by environment variables, its data and its submissions."""

REPO, PREFIX = "willdepueoai/parameter-golf", "datasets"  # Hugging Face repository and folder of the published data
REPO_VARIABLE, PREFIX_VARIABLE = "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
DOCS, DOCS_SOURCE = "docs_selected.jsonl", "docs_selected.source_manifest.json"
