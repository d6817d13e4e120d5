"""HTTP front door: routes, IAM, watcher, routing to edges by sandbox id."""
