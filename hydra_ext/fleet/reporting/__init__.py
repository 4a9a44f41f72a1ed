"""What people see of a fleet: its status, and its report as a page of HTML. All of it is read from files."""
