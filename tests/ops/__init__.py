"""Operations: metrics, monitoring, deployment."""
