"""Programs that a model wrote: what runs in their sessions, and how a worker runs, calls, compiles and checks them."""
