"""Private inference itself: parties that run a prompt and then token after token, as it was priced."""
