"""The accountants: three upper bounds on what a bill costs. The smallest of them is the price."""
