"""What each key of a function.yaml is for, and its default, in words."""

from collections.abc import Mapping

# key: (default where it is not that of its record, text)
FUNCTION_YAML_HELP: Mapping[str, tuple[str, str]] = {
    "name": ("the folder's", "Name of the function; `hypercast deploy --name` takes precedence."),
    "description": ("", "Free text, shown by `list` and `describe`."),
    "task": ("that of the model", "What the function computes. With a handler it is `handler`."),
    "model": (
        "",
        "A folder beside the file, an absolute path, a hub id or a URL; `deploy --model` names one, too.",
    ),
    "dtype": ("auto", "Type to which weights are converted; `auto`: as they are stored."),
    "engine": ("native", "What runs the model."),
    "engine_args": ("", "Arguments of vLLM's server, with `engine: vllm`."),
    "handler": ("", "`FILE.py:FUNCTION` in the folder, or `builtin:echo`, instead of a model."),
    "env": ("", "Environment of the handler: names and values."),
    "secrets": ("", "Names of secrets that the handler has in its environment."),
    "limits.memory": ("", "Memory of the handler's processes together."),
    "limits.cpu": ("", "Processor time within one call."),
    "limits.timeout": ("", "Time of a call; its caller may set less."),
    "limits.output": ("", "The whole output of one call."),
    "limits.file_size": ("", "Size of each file that the handler writes."),
    "limits.open_files": ("", "Open files of each process."),
    "limits.threads": ("", "Plain (not async) calls that run at once."),
    "limits.tasks": ("", "Processes and threads in all."),
    "scaling.min_instances": ("", "Instances that always run."),
    "scaling.max_instances": ("all nodes", "Most instances at once."),
    "scaling.target_concurrency": (
        "",
        "Concurrent calls per instance, by which the policy `concurrency` scales.",
    ),
    "scaling.keep_alive": ("", "Time without calls after which an instance stops."),
    "scaling.host_keep_alive": ("", "Time without use after which a surplus copy in host memory is dropped."),
    "scaling.host_copies": ("", "Copies of the image that the cluster keeps in host memory: 1 or 0."),
    "scaling.live": ("", "Whether nodes serve while they load the model, and how."),
    "scaling.policy": (
        "load for models that generate, else concurrency",
        "What the number of instances follows: calls, or the load in tokens.",
    ),
    "scaling.scale_down": (
        "start, or delay where a scale_down_delay is given",
        "When the policy `load` stops instances beyond the load: once it has kept them for as long as a "
        "further start would take, or for `scale_down_delay`.",
    ),
    "scaling.scale_down_delay": ("", "How long `scale_down: delay` keeps instances beyond the load."),
    "scaling.ttft_target": ("", "Time to the first token that `policy: load` and `live: auto` aim for."),
    "scaling.tbt_target": ("", "Time between tokens that `policy: load` aims for."),
    "scaling.serving": (
        "",
        "Whether each instance runs prompts and continues them, or some do the one and others the other.",
    ),
}
