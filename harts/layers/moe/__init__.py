"""What training adds to a router: load statistics, auxiliary losses, given routes. docs/moe.md has the definitions."""
