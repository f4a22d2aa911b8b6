"""The slow-network lab: workers in network namespaces of one machine, joined by shaped links."""
