"""Filter, power of d choices, in-flight overlay; pure, driven by watcher views."""
