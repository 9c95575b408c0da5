"""The `hypercast` command.

- `board`: the cluster as frames of the watch show it
- `call_input`: the input of a call, as options and as a body
- `client`: client of the gateway's HTTP interface
- `cluster_view`: the cluster on one screen
- `commands/`: the commands
- `completion`: completion of names in shells
- `contexts`: the configuration file, with gateways and keys
- `errors`: exceptions and their exit codes
- `examples`: the example functions of an installation
- `exports`: exports of the ledger as files
- `feed`: the cluster followed in a thread
- `group`: the command group
- `health`: warning where shown data may be out of date
- `interpreter`: the interpreter that runs other programs of Hypercast
- `interrupts`: Ctrl-C during imports
- `jobs`: predictions and batches of the caller
- `options`: options shared by commands
- `output`: tables, JSON and CSV on stdout
- `plan_view/`: views of transfer plans
- `progress`: progress on stderr
- `reference/`: the reference pages of the documents, from the code
- `refresh`: output that is drawn again when something has changed
- `settings`: address and key of the gateway
- `supervise/`: the processes of `hypercast up`
- `tables`: tables that fit the terminal
- `upload/`: uploads of functions
- `values`: sizes, times, durations, money as text
"""
